"""A reward function of the user's, from a Python file."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError
from paceline.rewards.registry import check_keywords

__all__ = ["CUSTOM_KEYWORDS", "load_custom_reward"]

CUSTOM_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_custom_reward(path: str | Path, name: str = "compute_score") -> Callable[..., float | dict[str, Any]]:
    """The function `name` of the file `path`, after a check that it takes the four keywords of a custom reward.

    Such a function has no attribute in an importable module: load it in the process that calls it.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"custom_reward_function.path={str(path)!r}: there is no such file.")
    module = _import_file(file)
    fn = getattr(module, name, None)
    if fn is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"custom_reward_function.name={name!r}: {file} has no such function.{hint} "
            f"It has: {', '.join(functions) or 'none'}."
        )
    check_keywords(fn, CUSTOM_KEYWORDS, f"custom_reward_function ({file})")
    return fn


def _import_file(file: Path) -> ModuleType:
    module_name = f"paceline_custom_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"custom_reward_function.path={str(file)!r} is not a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"custom_reward_function.path={str(file)!r}: importing it failed: {error!r}.") from error
    return module
