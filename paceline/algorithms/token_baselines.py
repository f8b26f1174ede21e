"""A baseline of least variance for each token: by columns, or for masks with holes by counting valid tokens."""

from __future__ import annotations

import torch

from paceline.algorithms.advantages import ESTIMATOR_REGISTRY
from paceline.algorithms.groups import GroupIds, Groups
from paceline.algorithms.masking import return_to_go, zero_outside

EPSILON = 1e-8
"""Added to the energy that a baseline is divided by."""


@ESTIMATOR_REGISTRY.register("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None = None,
    old_log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The return from each token on, minus the best constant for its column of the group (OTB, arXiv:2602.07078).

    With the sampled token's probability p and the sum q of all squared probabilities there, 1 - 2p + q is the squared
    norm of the gradient of log p by the logits. A token's energy E is that, added up over the valid tokens up to it.
    With G, the rewards of the valid tokens from it on, without discount:

        baseline = sum of G * E / (sum of E + epsilon)        over the rows of the group that are valid in this column
        A = G - baseline

    `rollout_is_weights`, where there are some, multiply the gradients, so the energies by their squares. In a column
    where one row of several is left, its baseline would be its own return, and its tail would learn nothing: there the
    baseline is 0. A group of one has nothing to be compared with: its advantage is 0.

    Returns the advantages and the returns G.
    """
    energy = _energy_by_token(old_log_probs, sum_pi_squared, rollout_is_weights)
    return _minus_baselines(token_level_rewards, energy, response_mask, index)


@ESTIMATOR_REGISTRY.register("tir_optimal_token_baseline")
@torch.no_grad()
def compute_tir_optimal_token_baseline_advantage(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None = None,
    old_log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the k-th valid tokens of the rows compared, in place of those of one column.

    For responses with holes in their mask, such as a tool's output between two turns: where the holes of the rows
    differ, tokens of one column are of different places in what the model wrote. Without holes it is the same.
    """
    energy = _energy_by_token(old_log_probs, sum_pi_squared, rollout_is_weights)
    order = (~response_mask.bool()).long().argsort(dim=-1, stable=True)  # valid tokens first, in their order
    rewards, energy, mask = (column.gather(-1, order) for column in (token_level_rewards, energy, response_mask))
    compact = _minus_baselines(rewards, energy, mask, index)
    advantages, returns = (torch.zeros_like(column).scatter(-1, order, column) for column in compact)
    return advantages, returns


def _minus_baselines(
    rewards: torch.Tensor, energy_by_token: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, by columns."""
    groups = Groups(response_mask, index)
    returns = return_to_go(rewards, response_mask)
    energy = zero_outside(zero_outside(energy_by_token, response_mask).cumsum(dim=-1), response_mask)
    baseline = groups.sum(returns * energy) / (groups.sum(energy) + EPSILON)
    is_alone = groups.sum(response_mask.bool().to(returns.dtype)) == 1
    has_others = groups.sizes(like=returns.sum(dim=-1)) > 1
    advantages = returns - torch.where(is_alone, 0.0, baseline)
    return zero_outside(advantages, response_mask.bool() & has_others.unsqueeze(-1)), returns


def _energy_by_token(
    old_log_probs: torch.Tensor | None, sum_pi_squared: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """The squared norm of the gradient of each token's log-prob by the logits, of what the token weighs."""
    if old_log_probs is None or sum_pi_squared is None:
        raise ValueError("A token baseline needs old_log_probs and sum_pi_squared of every token; none were given.")
    # It can't be negative, but in float32 the three numbers add up only to within rounding.
    energy = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    return energy if weights is None else energy * weights.square()
