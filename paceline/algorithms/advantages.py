"""From token rewards to advantages and returns: how estimators are called, and how they are found by their names.

All columns are (batch, response); results are 0 outside the response mask. An estimator sees the batch of a whole
step at once, because it normalises over it or over groups. The built-in ones are in `advantages_by_token`,
`advantages_by_group` and `token_baselines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from paceline.catalog import ESTIMATORS, EstimatorEntry, Registry


class AdvantageEstimator(Protocol):
    """How a registered estimator is called, with what it needs. Returns (advantages, returns).

    Every one gets the rewards, the mask, `values`, `index`, `reward_baselines`, `gamma`, `lam` and `norm_by_std`. The
    others are given where the estimator says that it needs them, or where they are set.
    """

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        index: np.ndarray | None = None,
        reward_baselines: torch.Tensor | None = None,
        reward_components: Mapping[str, torch.Tensor] | None = None,
        component_weights: Mapping[str, float] | None = None,
        old_log_probs: torch.Tensor | None = None,
        sum_pi_squared: torch.Tensor | None = None,
        rollout_is_weights: torch.Tensor | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        lam_critic: float | None = None,
        lam_length_alpha: float | None = None,
        norm_by_std: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


ESTIMATOR_REGISTRY: Registry[AdvantageEstimator, EstimatorEntry] = Registry(ESTIMATORS)


def register_adv_estimator(
    name: str,
    *,
    needs_critic: bool,
    needs_groups: bool = False,
    needs_baseline: bool = False,
    needs_components: bool = False,
    needs_sum_pi_squared: bool = False,
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make an estimator available as `algorithm.adv_estimator=name`.

    With `needs_critic` a run has a critic, and the estimator gets its `values`. With `needs_groups` there are at least
    two responses to each prompt; `index` says whose. With `needs_baseline` a greedy response to each prompt is
    generated too, and `reward_baselines` (batch,) is its score. With `needs_components` it gets `reward_components`,
    the columns (batch,) that `algorithm.gdpo_reward_keys` names, and `component_weights`. With `needs_sum_pi_squared`
    it gets `old_log_probs` and `sum_pi_squared`, of each token the sum of the squared probabilities of all tokens.
    """
    entry = EstimatorEntry(
        needs_critic=needs_critic,
        needs_groups=needs_groups,
        needs_baseline=needs_baseline,
        needs_components=needs_components,
        needs_sum_pi_squared=needs_sum_pi_squared,
    )
    return ESTIMATOR_REGISTRY.register(name, entry)


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError when there is none."""
    return ESTIMATOR_REGISTRY.get(name)


def estimator_needs(name: str) -> EstimatorEntry:
    """What the estimator registered as `name` needs; ConfigError when there is none."""
    return ESTIMATOR_REGISTRY.entry(name)
