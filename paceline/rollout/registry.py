"""Rollout engines by the name that `actor_rollout_ref.rollout.name` gives."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import ConfigError
from paceline.rollout.base import RolloutEngine

EngineClass = TypeVar("EngineClass", bound=type[RolloutEngine])

# Imported on first use: an engine may need a heavy or optional package.
_BUILTIN_MODULES = {name: f"paceline.rollout.{name}" for name in ("native", "hf", "vllm")}
_ENGINES: dict[str, type[RolloutEngine]] = {}


def register_rollout(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes a rollout engine known under `name`."""

    def register(engine: EngineClass) -> EngineClass:
        known = _ENGINES.setdefault(name, engine)
        if known is not engine:
            raise ConfigError(
                f"rollout engine {name!r} is already {known.__module__}.{known.__qualname__}; "
                f"register {engine.__module__}.{engine.__qualname__} under another name."
            )
        return engine

    return register


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class registered under `name`."""
    if name not in _ENGINES and name in _BUILTIN_MODULES:
        importlib.import_module(_BUILTIN_MODULES[name])
    if name not in _ENGINES:
        known = sorted({*_ENGINES, *_BUILTIN_MODULES})
        nearest = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is {name!r}, which is no rollout engine; {hint}Known: {', '.join(known)}."
        )
    return _ENGINES[name]
