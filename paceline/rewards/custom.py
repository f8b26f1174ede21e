"""The user's reward function from a Python file: `custom_reward_function` of a configuration."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from paceline.errors import ConfigError
from paceline.external import import_file
from paceline.rewards.scorer import RewardFunction
from paceline.text import did_you_mean

__all__ = ["CustomReward", "load_custom_reward"]


class CustomReward(RewardFunction):
    """A function of a file. Pickled, it is the file's name; the file is imported by whoever calls the function."""

    def __init__(self, fn: Callable[..., object], path: Path, name: str, kwargs: Mapping[str, object]) -> None:
        super().__init__(fn, kwargs, what=f"custom_reward_function ({path})")
        self.path = path
        self.name = name

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "fn"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        _require_file(self.path)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name != "fn":
            raise AttributeError(name)
        self.fn = getattr(_import(self.path), self.name)
        return self.fn

    def source(self) -> bytes:
        return pickle.dumps(("file", self.path, self.name))


def load_custom_reward(
    path: str | Path, name: str = "compute_score", reward_kwargs: Mapping[str, object] | None = None
) -> CustomReward:
    """The function `name` of the file `path`, after a check that it takes the keywords of one of the two forms.

    `reward_kwargs` are further keyword arguments that it is always called with.
    """
    file = Path(path).expanduser().resolve()
    _require_file(file)
    module = _import(file)
    fn = getattr(module, name, None)
    if fn is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, functions)
        raise ConfigError(
            f"custom_reward_function.name={name!r}: {file} has no such function.{hint} "
            f"It has: {', '.join(functions) or 'none'}."
        )
    return CustomReward(fn, file, name, reward_kwargs or {})


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"custom_reward_function.path={str(file)!r}: there is no such file on {platform.node()}.")


def _import(file: Path) -> ModuleType:
    try:
        return import_file(file, "paceline_custom_reward")
    except Exception as error:
        raise ConfigError(f"custom_reward_function.path={str(file)!r}: importing it failed: {error!r}.") from error
