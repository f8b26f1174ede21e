"""What a response is worth: rules by `data_source`, functions of the user's, and the manager that calls them."""

from __future__ import annotations

from paceline.rewards.custom import load_custom_reward
from paceline.rewards.manager import RewardManager
from paceline.rewards.registry import _select_rm_score_fn, known_sources, register_scorer

__all__ = ["RewardManager", "_select_rm_score_fn", "known_sources", "load_custom_reward", "register_scorer"]
