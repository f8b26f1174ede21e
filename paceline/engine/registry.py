"""Training backends by the name that `strategy` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.algorithms.registry import Registry
from paceline.engine.base import Engine

EngineClass = TypeVar("EngineClass", bound=type[Engine])

MODULES = {
    "local": "paceline.engine.local",
    "fsdp": "paceline.engine.fsdp",
    "fsdp2": "paceline.engine.fsdp",
    "torchtitan": "paceline.engine.torchtitan",
    "veomni": "paceline.engine.veomni",
    "megatron": "paceline.engine.megatron",
}
_ENGINES: Registry[type[Engine]] = Registry("strategy", MODULES)


def register_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes an engine known as `strategy=name`."""
    return _ENGINES.register(name)


def get_engine(name: str) -> type[Engine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
