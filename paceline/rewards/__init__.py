"""What a response is worth: rules by `data_source`, functions of the user's, and the manager that calls them."""

from __future__ import annotations

from paceline.rewards.build import make_reward_manager
from paceline.rewards.combine import add_model_scores, combine_scores, uses_model
from paceline.rewards.custom import CustomReward, load_custom_reward
from paceline.rewards.manager import RewardManager
from paceline.rewards.overlong import Overlong, overlong_penalty
from paceline.rewards.registry import Scorer, _select_rm_score_fn, known_sources, register_scorer
from paceline.rewards.report import reward_metrics

__all__ = [
    "CustomReward",
    "Overlong",
    "RewardManager",
    "Scorer",
    "_select_rm_score_fn",
    "add_model_scores",
    "combine_scores",
    "known_sources",
    "load_custom_reward",
    "make_reward_manager",
    "overlong_penalty",
    "register_scorer",
    "reward_metrics",
    "uses_model",
]
