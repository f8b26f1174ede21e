"""Values that no run can have: ranges, choices, files, and keys that contradict each other.

Runs before Ray starts. Every message begins with the key that it is about, and says what to set. What holds for one key
alone stands on its field (paceline/config/field_rules.py) or in the catalogue; the rules between keys are in the
modules of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paceline.catalog import BACKENDS, ESTIMATORS, LOGGERS, LOSSES, ROLLOUTS
from paceline.config import AnyRunConfig, PPOConfig
from paceline.config.checks.agent_checks import check_agents
from paceline.config.checks.batch_checks import check_mini_batches, check_pools
from paceline.config.checks.correction_checks import check_correction, check_policy_loss
from paceline.config.checks.distillation_checks import check_distillation
from paceline.config.checks.estimator_checks import check_estimator
from paceline.config.checks.model_checks import check_backends, check_device, check_lora, check_models
from paceline.config.checks.run_checks import check_columns, check_data, check_rewards, check_run
from paceline.config.checks.sampling_checks import check_algorithm, check_sampling
from paceline.config.checks.schedule_checks import check_schedule, schedule_notes
from paceline.config.derived import learns_from_rewards, uses_agents, uses_critic, uses_reference, with_backends
from paceline.config.dialect.choices import refused_choice
from paceline.config.field_rules import Each, OnlyWith, Range
from paceline.config.keys import ACTOR, known_keys, value_of
from paceline.config.load import Config, Problems, read_config
from paceline.config.machine_problems import MachineProblem
from paceline.errors import ConfigError
from paceline.external import is_installed


def validate(config: Config) -> PPOConfig:
    """The complete configuration, or a ConfigError with all problems of its keys, types and values."""
    reading = read_config(config)
    if problems := all_problems(reading.cfg, reading.problems):
        raise ConfigError(problems)
    return reading.cfg


def all_problems(cfg: PPOConfig, unread: Problems) -> list[str]:
    """The problems of `read_config`, and those of the configuration that it gave."""
    return without_unread(check_config(cfg), unread)


def without_unread(problems: list[str], unread: Problems) -> list[str]:
    """The problems of `read_config`, then those of its configuration.

    A key that could not be read has its default now: what the checks say of it would confuse.
    """
    return [*unread.values(), *(problem for problem in problems if _about(problem) not in unread)]


def check_config(cfg: PPOConfig) -> list[str]:
    """All problems of a complete configuration; none is an empty list."""
    cfg = with_backends(cfg)
    out_of_range = list(check_ranges(cfg))
    problems = [
        *check_choices(cfg),
        *out_of_range,
        *check_data(cfg),
        *check_models(cfg),
        *check_lora(cfg),
        *check_algorithm(cfg),
        *check_policy_loss(cfg),
        *check_correction(cfg),
        *check_estimator(cfg),
        *check_distillation(cfg),
        *check_rewards(cfg),
        *check_sampling(cfg),
        *check_run(cfg),
        *check_schedule(cfg),
        *check_agents(cfg),
        *check_backends(cfg),
        *check_device(cfg),
    ]
    # Arithmetic on numbers that are out of range would only add confusion.
    if not out_of_range:
        problems += [*check_columns(cfg), *check_mini_batches(cfg), *check_pools(cfg)]
    return problems


def check_ranges(cfg: AnyRunConfig) -> Iterator[str]:
    """Numbers that are out of range."""
    for name, key in known_keys(type(cfg)).items():
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


def check_choices(cfg: PPOConfig) -> Iterator[str]:
    """Names that nobody registered. Closed choices are Literals, which the loader checks."""
    strategies = (f"{ACTOR}.strategy", "critic.strategy", "reward_model.strategy")
    for key, catalog in (
        *((catalog.key, catalog) for catalog in (ESTIMATORS, LOSSES, ROLLOUTS)),
        *((key, BACKENDS) for key in strategies),
    ):
        if catalog.get(name := value_of(cfg, key)) is None:
            yield refused_choice(key, name, catalog.built_in)
    yield from check_loggers(cfg.trainer.logger)


def check_loggers(names: Iterable[str]) -> Iterator[str]:
    """Problems of trainer.logger: unknown names, and trackers whose package is not installed."""
    for name in names:
        tracker = LOGGERS.get(name)
        if tracker is None:
            yield refused_choice(LOGGERS.key, name, LOGGERS.built_in)
        elif tracker.package and not is_installed(tracker.package):
            yield MachineProblem(
                f"trainer.logger={name} needs the package {tracker.package}, which is not installed: "
                f"pip install {tracker.requirement}"
            )


def unused_settings(cfg: PPOConfig) -> list[str]:
    """Settings of roles that this run does not have, a sentence for each role; and a schedule that gains nothing.

    They are no errors: launch scripts for several estimators share one list of overrides.
    """
    alone = "there is no critic where a teacher alone trains"
    without = f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} has no critic"
    parts = (
        (uses_critic(cfg), OnlyWith.CRITIC, without if learns_from_rewards(cfg) else alone),
        (cfg.distillation.enabled, OnlyWith.TEACHER, "distillation.enabled=False"),
        (uses_reference(cfg), OnlyWith.REFERENCE, "no KL term is on, so there is no reference"),
        (cfg.reward_model.enable, OnlyWith.REWARD_MODEL, "reward_model.enable=False"),
        (uses_agents(cfg), OnlyWith.AGENTS, "responses are single turns"),
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
    return [*notes, *schedule_notes(cfg)]


def _about(problem: str) -> str:
    """The key that a message begins with."""
    match = re.match(r"[\w.]*\w", problem)
    return match.group() if match else ""
