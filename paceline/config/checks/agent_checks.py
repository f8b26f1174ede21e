"""Conversations: their loops and formats, and what can't be combined with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from paceline.catalog import AGENT_LOOPS, ESTIMATORS, ROLLOUTS, TOOL_FORMATS
from paceline.config import MultiTurnConfig, PPOConfig
from paceline.config.derived import rollout_pools, uses_agents
from paceline.config.dialect.choices import refused_choice
from paceline.config.keys import ROLLOUT
from paceline.errors import ConfigError

ON = f"{ROLLOUT}.multi_turn.enable=True"


def check_agents(cfg: PPOConfig) -> Iterator[str]:
    """Names that nobody registered, settings without effect, and parts of a run that know no conversations."""
    rollout, schedule = cfg.actor_rollout_ref.rollout, cfg.trainer.schedule
    agent, multi_turn = rollout.agent, rollout.multi_turn
    if TOOL_FORMATS.get(multi_turn.format) is None:
        yield refused_choice(TOOL_FORMATS.key, multi_turn.format, TOOL_FORMATS.built_in)
    if agent.agent_loop_config_path is None and AGENT_LOOPS.get(agent.default_agent_loop) is None:
        yield refused_choice(AGENT_LOOPS.key, agent.default_agent_loop, AGENT_LOOPS.built_in)
    if not uses_agents(cfg):
        yield from _check_unused(cfg)
        return
    said = f"{ON} or an agent loop"
    engine, estimator = ROLLOUTS.get(rollout.name), ESTIMATORS.get(cfg.algorithm.adv_estimator)
    if engine is not None and not engine.takes_requests_singly:
        yield f"{ROLLOUT}.name={rollout.name} samples whole batches; with {said} set native or vllm."
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: workers that share an engine "
            f"sample in step, and a conversation can't; with {said} set 1."
        )
    if schedule.name != "sync":
        yield f"trainer.schedule.name={schedule.name} is not supported with {said} yet; set sync."
    if estimator is not None and estimator.needs_baseline:
        yield (
            f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} wants a greedy response beside each, which a "
            f"conversation has not; with {said} take another estimator, such as grpo."
        )
    if cfg.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups.enable=True is not supported with {said} yet; set it to False."
    if cfg.reward_model.enable:
        yield (
            f"reward_model.enable=True: a reward model scores one response, and no conversation; with {said} set it to "
            "False and give a reward function, or rewards by turns."
        )
    if cfg.data.custom_cls.path is not None:
        yield f"data.custom_cls.path={cfg.data.custom_cls.path} is not supported with {said}: they need the raw chat."
    try:
        pools = rollout_pools(cfg.trainer)
    except ConfigError:  # said elsewhere
        return
    if len(pools) > 1:
        yield f"trainer.placement.rollout_on={pools}: with {said} the rollout is on one pool; name one."


def _check_unused(cfg: PPOConfig) -> Iterator[str]:
    """What was set for conversations in a run that has none."""
    rollout = cfg.actor_rollout_ref.rollout
    default = MultiTurnConfig()
    for name in (field.name for field in fields(default)):
        if (value := getattr(rollout.multi_turn, name)) != getattr(default, name):
            yield f"{ROLLOUT}.multi_turn.{name}={value} has no part in a run of single turns; set {ON}."
    if rollout.agent.rewards != "end":
        yield f"{ROLLOUT}.agent.rewards={rollout.agent.rewards} has no part in a run of single turns; set {ON}."
