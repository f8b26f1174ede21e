"""From token rewards to advantages and returns, by the estimator that `algorithm.adv_estimator` names.

All columns are (batch, response); results are 0 outside the response mask. An estimator sees the batch of a whole
step at once, because it normalises over it or over groups.
"""

from paceline.algorithms.advantages.estimators import (
    AdvantageEstimator,
    get_adv_estimator,
    needs_baseline,
    needs_critic,
    needs_groups,
    register_adv_estimator,
)
from paceline.algorithms.advantages.group_relative import (
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_advantage,
    compute_rloo_outcome_advantage,
)
from paceline.algorithms.advantages.token_level import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_advantage,
    compute_remax_outcome_advantage,
)

__all__ = [
    "AdvantageEstimator",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_reinforce_plus_plus_advantage",
    "compute_reinforce_plus_plus_baseline_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "get_adv_estimator",
    "needs_baseline",
    "needs_critic",
    "needs_groups",
    "register_adv_estimator",
]
