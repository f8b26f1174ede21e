"""What each key may be, whatever the others are: ranges, and names that a registry knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.config import PPOConfig
from paceline.config.field_rules import Each, Range
from paceline.config.keys import ACTOR, ROLLOUT, known_keys, value_of
from paceline.config.unsupported import refused_choice


@dataclass(frozen=True)
class KnownNames:
    """Names that a configuration may choose from. The trainer adds what users registered."""

    adv_estimators: tuple[str, ...] = (
        "gae",
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
    )
    critic_estimators: tuple[str, ...] = ("gae",)
    """Those of adv_estimators that need a critic."""
    group_estimators: tuple[str, ...] = ("grpo", "rloo", "reinforce_plus_plus_baseline")
    """Those of adv_estimators that compare the responses to one prompt."""
    baseline_estimators: tuple[str, ...] = ("remax",)
    """Those of adv_estimators that compare with a greedy response."""
    policy_losses: tuple[str, ...] = ("vanilla", "gspo", "cispo")
    strategies: tuple[str, ...] = ("local", "fsdp", "fsdp2", "torchtitan", "veomni", "megatron")
    rollouts: tuple[str, ...] = ("native", "vllm", "hf")
    loggers: tuple[str, ...] = ("console", "tensorboard", "wandb")


LORA_STRATEGIES = ("local", "fsdp2")
"""Those of KnownNames.strategies that train adapters."""
OPTIONAL_BACKENDS = ("torchtitan", "veomni", "megatron")
"""Each is called as the package that it imports."""
TENSOR_PARALLEL = ("megatron", "torchtitan")


def check_ranges(cfg: PPOConfig) -> Iterator[str]:
    """Numbers that are out of range."""
    for name, key in known_keys().items():
        value = value_of(cfg, name)
        if key.range is not None and value is not None and value not in key.range:
            yield f"{name}={value} is out of range; set it {_phrase(key.range)}."
        each = key.rule(Each)
        if each is not None and not all(item in each.range for item in value):
            yield f"{name}={list(value)} is out of range; set each {each.range}."


def _phrase(allowed: Range) -> str:
    """A range after the words "set it"."""
    text = repr(allowed)
    return text if text.startswith("in") else f"to a number {text}"


def check_choices(cfg: PPOConfig, known: KnownNames) -> Iterator[str]:
    """Names that registries know. Closed choices are Literals, which the loader checks."""
    choices = {
        "algorithm.adv_estimator": known.adv_estimators,
        f"{ACTOR}.policy_loss.loss_mode": known.policy_losses,
        f"{ACTOR}.strategy": known.strategies,
        "critic.strategy": known.strategies,
        "reward_model.strategy": known.strategies,
        f"{ROLLOUT}.name": known.rollouts,
    }
    for key, names in choices.items():
        yield from _check_choice(key, value_of(cfg, key), names)
    yield from check_loggers(cfg.trainer.logger, known.loggers)


def check_loggers(names: Iterable[str], known: Iterable[str] = KnownNames.loggers) -> Iterator[str]:
    """Problems of trainer.logger: unknown names, and trackers whose package is not installed."""
    for name in names:
        yield from _check_choice("trainer.logger", name, known)
        if name == "wandb" and importlib.util.find_spec("wandb") is None:
            yield "trainer.logger=wandb needs the package wandb, which is not installed: pip install wandb==0.28.2"


def _check_choice(key: str, value: str, known: Iterable[str]) -> Iterator[str]:
    if value not in known:
        yield refused_choice(key, value, known)
