"""A reward function of the user's, from a Python file."""

from __future__ import annotations

import difflib
import importlib.util
import platform
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError
from paceline.rewards.functions import RewardFunction

__all__ = ["CustomReward", "load_custom_reward"]


class CustomReward(RewardFunction):
    """A function of a file. Pickled, it is the file's name: where it arrives, it is loaded from there again."""

    def __init__(self, fn: Callable[..., Any], path: Path, name: str, kwargs: Mapping[str, Any]) -> None:
        super().__init__(fn, kwargs, what=f"custom_reward_function ({path})")
        self.path = path
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., CustomReward], tuple[str, str, dict[str, Any]]]:
        return (load_custom_reward, (str(self.path), self.name, self.kwargs))


def load_custom_reward(
    path: str | Path, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> CustomReward:
    """The function `name` of the file `path`, after a check that it takes the keywords of one of the two forms.

    `reward_kwargs` are further keyword arguments that it is always called with.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"custom_reward_function.path={str(path)!r}: there is no such file on {platform.node()}.")
    module = _import_file(file, file.stat().st_mtime_ns)
    fn = getattr(module, name, None)
    if fn is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"custom_reward_function.name={name!r}: {file} has no such function.{hint} "
            f"It has: {', '.join(functions) or 'none'}."
        )
    return CustomReward(fn, file, name, reward_kwargs or {})


@cache
def _import_file(file: Path, modified_ns: int) -> ModuleType:
    """The module of a file, once per process: what it holds at module level, such as a client, is held once."""
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
