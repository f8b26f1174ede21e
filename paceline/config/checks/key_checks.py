"""What each key may be, whatever the others are: ranges, and names that a registry knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.catalog import BACKENDS, ESTIMATORS, LOGGERS, LOSSES, ROLLOUTS
from paceline.config import PPOConfig
from paceline.config.field_rules import Each, Range
from paceline.config.keys import ACTOR, ROLLOUT, known_keys, value_of
from paceline.config.unsupported import refused_choice


@dataclass(frozen=True)
class KnownNames:
    """Names that a configuration may choose from: those that are built in, unless said otherwise."""

    adv_estimators: tuple[str, ...] = tuple(ESTIMATORS.built_in)
    critic_estimators: tuple[str, ...] = tuple(
        name for name, entry in ESTIMATORS.built_in.items() if entry.needs_critic
    )
    """Those of adv_estimators that need a critic."""
    group_estimators: tuple[str, ...] = tuple(name for name, entry in ESTIMATORS.built_in.items() if entry.needs_groups)
    """Those of adv_estimators that compare the responses to one prompt."""
    baseline_estimators: tuple[str, ...] = tuple(
        name for name, entry in ESTIMATORS.built_in.items() if entry.needs_baseline
    )
    """Those of adv_estimators that compare with a greedy response."""
    policy_losses: tuple[str, ...] = tuple(LOSSES.built_in)
    strategies: tuple[str, ...] = tuple(BACKENDS.built_in)
    rollouts: tuple[str, ...] = tuple(ROLLOUTS.built_in)
    loggers: tuple[str, ...] = tuple(LOGGERS.built_in)


def known_names(cfg: PPOConfig) -> KnownNames:
    """The built-in names, and those of `cfg` that were registered in this process."""
    actor = cfg.actor_rollout_ref.actor
    estimators = ESTIMATORS.with_registered([cfg.algorithm.adv_estimator])
    strategies = (actor.strategy, cfg.critic.strategy, cfg.reward_model.strategy)
    return KnownNames(
        adv_estimators=tuple(estimators),
        critic_estimators=tuple(name for name, entry in estimators.items() if entry.needs_critic),
        group_estimators=tuple(name for name, entry in estimators.items() if entry.needs_groups),
        baseline_estimators=tuple(name for name, entry in estimators.items() if entry.needs_baseline),
        policy_losses=tuple(LOSSES.with_registered([actor.policy_loss.loss_mode])),
        strategies=tuple(BACKENDS.with_registered(strategies)),
        rollouts=tuple(ROLLOUTS.with_registered([cfg.actor_rollout_ref.rollout.name])),
    )


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
        tracker = LOGGERS.get(name)
        if tracker is not None and tracker.package and importlib.util.find_spec(tracker.package) is None:
            yield (
                f"trainer.logger={name} needs the package {tracker.package}, which is not installed: "
                f"pip install {tracker.requirement}"
            )


def _check_choice(key: str, value: str, known: Iterable[str]) -> Iterator[str]:
    if value not in known:
        yield refused_choice(key, value, known)
