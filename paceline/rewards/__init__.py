"""What a response is worth: rules by `data_source`, functions of the user's, and the manager that calls them.

From rows to rewards, a file each:

    manager          RewardManager: decodes, grades, puts scores on tokens; `make_reward_manager` reads a configuration
    coverage         who scores which row, and rows that nobody scores
    by_source        which scorer grades which data_source; `register_scorer`
    scorer, custom   what a scorer is; the user's function from a file
    grading          what happens when grading fails
    combine          rule, model and length penalty, added up
    graded_columns   columns and metrics of graded rows
    killable         calls that are killed at a deadline; killable_side is what runs there
    score/           graders: gsm8k, hellaswag, math, code
    sandbox/         where programs run that nobody has read

A new grader is a file in `score/` and a line in `by_source`. A reward for one task of your own needs neither: see
`custom_reward_function` and `register_scorer` in docs/rewards.md.
"""

from __future__ import annotations

from paceline.rewards.by_source import _select_rm_score_fn, known_sources, register_scorer
from paceline.rewards.combine import (
    UNSHAPED_SCORE,
    Overlong,
    add_model_scores,
    at_last_token,
    combine_scores,
    overlong_penalty,
    rows_of_model,
    uses_model,
)
from paceline.rewards.custom import CustomReward, load_custom_reward
from paceline.rewards.graded_columns import UNNAMED, columns_of, columns_of_batch, reward_metrics, settle_accuracy
from paceline.rewards.manager import RewardManager, make_reward_manager
from paceline.rewards.scorer import Scorer

__all__ = [
    "UNNAMED",
    "UNSHAPED_SCORE",
    "CustomReward",
    "Overlong",
    "RewardManager",
    "Scorer",
    "_select_rm_score_fn",
    "add_model_scores",
    "at_last_token",
    "columns_of",
    "columns_of_batch",
    "combine_scores",
    "known_sources",
    "load_custom_reward",
    "make_reward_manager",
    "overlong_penalty",
    "register_scorer",
    "reward_metrics",
    "rows_of_model",
    "settle_accuracy",
    "uses_model",
]
