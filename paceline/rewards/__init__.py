"""What a response is worth: rules by `data_source`, functions of the user's, and the manager that calls them."""

from __future__ import annotations

from paceline.rewards.build import make_reward_manager
from paceline.rewards.combine import add_model_scores, at_last_token, combine_scores, uses_model
from paceline.rewards.custom import CustomReward, load_custom_reward
from paceline.rewards.manager import RewardManager
from paceline.rewards.overlong import Overlong, overlong_penalty
from paceline.rewards.report import columns_of, reward_metrics, settle_accuracy
from paceline.rewards.scorers import Scorer, _select_rm_score_fn, known_sources, register_scorer

__all__ = [
    "CustomReward",
    "Overlong",
    "RewardManager",
    "Scorer",
    "_select_rm_score_fn",
    "add_model_scores",
    "at_last_token",
    "columns_of",
    "combine_scores",
    "known_sources",
    "load_custom_reward",
    "make_reward_manager",
    "overlong_penalty",
    "register_scorer",
    "reward_metrics",
    "settle_accuracy",
    "uses_model",
]
