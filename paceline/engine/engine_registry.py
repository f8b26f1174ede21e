"""Training backends by the name that `strategy` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.algorithms.registry import Registry
from paceline.engine.engine_interface import Engine

EngineClass = TypeVar("EngineClass", bound=type[Engine])

MODULES = {
    name: f"paceline.engine.backends.{module}"
    for name, module in {
        "local": "local_engine",
        "fsdp": "fsdp",
        "fsdp2": "fsdp",
        "torchtitan": "torchtitan",
        "veomni": "veomni",
        "megatron": "megatron",
    }.items()
}
_ENGINES: Registry[type[Engine]] = Registry("strategy", MODULES)


def register_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes an engine known as `strategy=name`."""
    return _ENGINES.register(name)


def get_engine(name: str) -> type[Engine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
