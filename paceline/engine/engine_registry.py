"""Training backends by the name that `strategy` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.algorithms.registry import Registry
from paceline.engine.hf_engine import Engine

EngineClass = TypeVar("EngineClass", bound=type[Engine])

MODULES = {
    "local": "paceline.engine.backends.local_engine",
    "fsdp": "paceline.engine.backends.fsdp",
    "fsdp2": "paceline.engine.backends.fsdp",
    "torchtitan": "paceline.engine.backends.torchtitan",
    "veomni": "paceline.engine.backends.veomni",
    "megatron": "paceline.engine.backends.megatron",
}
_ENGINES: Registry[type[Engine]] = Registry("strategy", MODULES)


def register_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes an engine known as `strategy=name`."""
    return _ENGINES.register(name)


def get_engine(name: str) -> type[Engine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
