"""Training backends by the name that `strategy` gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from paceline.algorithms.registry import unknown_choice
from paceline.engine.base import Engine
from paceline.errors import ConfigError

EngineClass = TypeVar("EngineClass", bound=type[Engine])

# Imported on first use: a backend may need a heavy or optional package.
_BUILTIN_MODULES = {
    "local": "paceline.engine.local",
    "fsdp": "paceline.engine.fsdp",
    "fsdp2": "paceline.engine.fsdp",
    "torchtitan": "paceline.engine.torchtitan",
    "veomni": "paceline.engine.veomni",
    "megatron": "paceline.engine.megatron",
}
_ENGINES: dict[str, type[Engine]] = {}


def register_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes an engine known as `strategy=name`."""

    def register(engine: EngineClass) -> EngineClass:
        known = _ENGINES.setdefault(name, engine)
        if known is not engine:
            raise ConfigError(
                f"engine {name!r} is already {known.__module__}.{known.__qualname__}; "
                f"register {engine.__module__}.{engine.__qualname__} under another name."
            )
        return engine

    return register


def get_engine(name: str) -> type[Engine]:
    """The engine class registered under `name`."""
    if name not in _ENGINES and name in _BUILTIN_MODULES:
        importlib.import_module(_BUILTIN_MODULES[name])
    if name not in _ENGINES:
        raise unknown_choice("strategy", name, {*_ENGINES, *_BUILTIN_MODULES})
    return _ENGINES[name]
