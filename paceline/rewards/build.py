"""The RewardManager that a configuration asks for."""

from __future__ import annotations

from typing import Any

from paceline.config import PPOConfig
from paceline.rewards.code_grader import code_scorer
from paceline.rewards.custom import load_custom_reward
from paceline.rewards.manager import RewardManager
from paceline.rewards.overlong import Overlong
from paceline.rewards.score import code
from paceline.rewards.scorers import CODE_SOURCES, get_scorer

__all__ = ["make_reward_manager"]


def make_reward_manager(cfg: PPOConfig, tokenizer: Any, num_examine: int, *, validation: bool = False) -> RewardManager:
    """Rules by data_source, or the function that custom_reward_function names, with all that reward_model sets."""
    custom, rewards = cfg.custom_reward_function, cfg.reward_model
    has_model = rewards.enable and (rewards.validate or not validation)
    # A scorer that the user registered for such a source stays.
    shipped = [source for source in CODE_SOURCES if get_scorer(source).one is code.compute_score]
    return RewardManager(
        tokenizer,
        num_examine,
        compute_score=load_custom_reward(custom.path, custom.name, custom.reward_kwargs) if custom.path else None,
        reward_fn_key=cfg.data.reward_fn_key,
        # Each process sees only its share of a batch: whether all of it failed is for the trainer to say.
        on_error=rewards.on_error or "zero_and_count",
        max_retries=rewards.max_retries,
        timeout_seconds=rewards.timeout_seconds,
        weights=rewards.weights if has_model else None,
        scorers=dict.fromkeys(shipped, code_scorer(rewards.sandbox)),
        overlong=_overlong(cfg),
    )


def _overlong(cfg: PPOConfig) -> Overlong | None:
    buffer = cfg.reward_model.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return None
    max_len = cfg.reward_model.reward_kwargs.max_resp_len or cfg.data.max_response_length
    return Overlong(max_len, buffer.len, buffer.penalty_factor, buffer.log)
