"""Conversations: their loops and formats, and what can't be combined with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.catalog import AGENT_LOOPS, ROLLOUTS, TOOL_FORMATS
from paceline.config import PPOConfig
from paceline.config.derived import estimator_in_use, rollout_pools, uses_agents
from paceline.config.dialect.choices import refused_choice
from paceline.config.keys import ROLLOUT
from paceline.errors import ConfigError

ON = f"{ROLLOUT}.multi_turn.enable=True"


def check_agents(cfg: PPOConfig) -> Iterator[str]:
    """Names that nobody registered, and parts of a run that know no conversations."""
    rollout = cfg.actor_rollout_ref.rollout
    agent, multi_turn = rollout.agent, rollout.multi_turn
    if TOOL_FORMATS.get(multi_turn.format) is None:
        yield refused_choice(TOOL_FORMATS.key, multi_turn.format, TOOL_FORMATS.built_in)
    if agent.agent_loop_config_path is None and AGENT_LOOPS.get(agent.default_agent_loop) is None:
        yield refused_choice(AGENT_LOOPS.key, agent.default_agent_loop, AGENT_LOOPS.built_in)
    for key, path in (
        (f"{ROLLOUT}.agent.agent_loop_config_path", agent.agent_loop_config_path),
        (f"{ROLLOUT}.multi_turn.tool_config_path", multi_turn.tool_config_path),
    ):
        if path is not None and not Path(path).is_file():
            yield f"{key}={path}: there is no such file."
    if not uses_agents(cfg):
        return
    said = f"{ON} or an agent loop"
    engine, estimator = ROLLOUTS.get(rollout.name), estimator_in_use(cfg)
    if engine is not None and not engine.takes_requests_singly:
        yield f"{ROLLOUT}.name={rollout.name} samples whole batches; with {said} set native or vllm."
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: workers that share an engine "
            f"sample in step, and a conversation can't; with {said} set 1."
        )
    if estimator is not None and estimator.needs_baseline:
        yield (
            f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} wants a greedy response beside each, which a "
            f"conversation has not; with {said} take another estimator, such as grpo."
        )
    if cfg.algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups.enable=True is not supported with {said} yet; set it to False."
    if cfg.reward_model.enable and agent.rewards == "turns":
        yield (
            f"reward_model.enable=True and {ROLLOUT}.agent.rewards=turns: then no score of a whole conversation "
            "counts; set rewards=both or end, or reward_model.enable=False."
        )
    if cfg.data.custom_cls.path is not None:
        yield f"data.custom_cls.path={cfg.data.custom_cls.path} is not supported with {said}: they need the raw chat."
    try:
        pools = rollout_pools(cfg.trainer)
    except ConfigError:  # said elsewhere
        return
    if len(pools) > 1:
        yield f"trainer.placement.rollout_on={pools}: with {said} the rollout is on one pool; name one."
