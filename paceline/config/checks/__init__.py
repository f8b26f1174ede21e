"""Values that no run can have: ranges, choices, files, and keys that contradict each other.

Runs before Ray starts. Every message begins with the key that it is about, and says what to set. What holds for one key
alone stands on its field (paceline/config/field_rules.py); here are the rules between keys, a file for each section.
"""

from __future__ import annotations

import re

from paceline.config import PPOConfig
from paceline.config.checks.algorithm_checks import check_algorithm
from paceline.config.checks.backend_checks import check_backends
from paceline.config.checks.batch_checks import check_batches_and_pools
from paceline.config.checks.data_checks import check_columns, check_data
from paceline.config.checks.key_checks import KnownNames, check_choices, check_loggers, check_ranges, known_names
from paceline.config.checks.model_checks import check_lora, check_models
from paceline.config.checks.reward_checks import check_rewards
from paceline.config.checks.run_checks import check_run
from paceline.config.checks.sampling_checks import check_sampling
from paceline.config.derived import uses_reference
from paceline.config.field_rules import OnlyWith, Range
from paceline.config.keys import known_keys, value_of
from paceline.config.load import Config, Problems, read_config
from paceline.errors import ConfigError

__all__ = ["KnownNames", "Range", "check_config", "check_loggers", "known_names", "unused_settings", "validate"]


def validate(config: Config, *, device: str | None = None, known: KnownNames | None = None) -> PPOConfig:
    """The complete configuration, or a ConfigError with all problems of its keys, types and values."""
    cfg, unread = read_config(config)
    if problems := all_problems(cfg, unread, device=device, known=known):
        raise ConfigError(problems)
    return cfg


def all_problems(
    cfg: PPOConfig, unread: Problems, *, device: str | None = None, known: KnownNames | None = None
) -> list[str]:
    """The problems of `read_config`, and those of the configuration that it gave."""
    # A key that could not be read has its default now: what the checks say of it would confuse.
    checked = [problem for problem in check_config(cfg, device=device, known=known) if _about(problem) not in unread]
    return [*unread.values(), *checked]


def check_config(cfg: PPOConfig, *, device: str | None = None, known: KnownNames | None = None) -> list[str]:
    """All problems of a complete configuration; none is an empty list.

    `device` is what trainer.device=null stands for on this machine, None if nobody asked yet; `known` are the names
    that may be chosen.
    """
    known = known or KnownNames()
    use_critic = cfg.algorithm.adv_estimator in known.critic_estimators
    out_of_range = list(check_ranges(cfg))
    problems = [
        *check_choices(cfg, known),
        *out_of_range,
        *check_data(cfg),
        *check_models(cfg, use_critic),
        *check_lora(cfg),
        *check_algorithm(cfg, known, use_critic),
        *check_rewards(cfg),
        *check_sampling(cfg),
        *check_surroundings(cfg, device=device, known=known),
    ]
    # Arithmetic on numbers that are out of range would only add confusion.
    if not out_of_range:
        problems += check_columns(cfg)
        problems += check_batches_and_pools(cfg, use_critic)
    return problems


def check_surroundings(cfg: PPOConfig, *, device: str | None = None, known: KnownNames | None = None) -> list[str]:
    """Those of the problems that depend on the device and on the run's folder, which may be filled in last."""
    device = device or cfg.trainer.device
    use_critic = cfg.algorithm.adv_estimator in (known or KnownNames()).critic_estimators
    return [*check_run(cfg, device), *check_backends(cfg, use_critic, device)]


def unused_settings(cfg: PPOConfig, known: KnownNames | None = None) -> list[str]:
    """Settings of roles that this run does not have, a sentence for each role.

    They are no errors: launch scripts for several estimators share one list of overrides.
    """
    known = known or KnownNames()
    has_critic = cfg.algorithm.adv_estimator in known.critic_estimators
    parts = (
        (has_critic, OnlyWith.CRITIC, f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} has no critic"),
        (uses_reference(cfg), OnlyWith.REFERENCE, "no KL term is on, so there is no reference"),
        (cfg.reward_model.enable, OnlyWith.REWARD_MODEL, "reward_model.enable=False"),
    )
    notes = []
    for has_part, part, reason in parts:
        unused = [
            f"{name}={value_of(cfg, name)}"
            for name, key in known_keys().items()
            if key.only_with is part and not key.is_section and value_of(cfg, name) != key.default
        ]
        if unused and not has_part:
            notes.append(f"{', '.join(unused)}: not used, because {reason}.")
    return notes


def _about(problem: str) -> str:
    """The key that a message begins with."""
    match = re.match(r"[\w.]*\w", problem)
    return match.group() if match else ""
