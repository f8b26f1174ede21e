"""Rollout engines by the name that `actor_rollout_ref.rollout.name` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.algorithms.registry import Registry
from paceline.rollout.rollout_interface import RolloutEngine

EngineClass = TypeVar("EngineClass", bound=type[RolloutEngine])

MODULES = {name: f"paceline.rollout.{name}" for name in ("native", "hf", "vllm")}
_ENGINES: Registry[type[RolloutEngine]] = Registry("actor_rollout_ref.rollout.name", MODULES)


def register_rollout(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes a rollout engine known under `name`."""
    return _ENGINES.register(name)


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
