"""The critic's loss."""

from __future__ import annotations

import torch

from paceline.algorithms.aggregation import Aggregate
from paceline.algorithms.masking import masked_sum, zero_outside


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    cliprange_value: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Squared error to the returns, clipped around the old values as in OpenAI's PPO implementation.

    (Analysed by Engstrom et al. 2020, arXiv:2005.12729, section 2.) Per token, with c = cliprange_value:

        loss = 0.5 * max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2)

    Takes (micro-batch, response) tensors and `agg`, which aggregates a matrix of token losses. Gives the loss and
    {"vf_clipfrac": tokens whose clipped branch is the larger one}; on those the gradient is zero.
    """
    values = zero_outside(values, response_mask)
    old_values = zero_outside(old_values, response_mask)
    returns = zero_outside(returns, response_mask)

    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = 0.5 * torch.maximum(unclipped, clipped)
    return agg(loss), {"vf_clipfrac": masked_sum((clipped > unclipped).float(), response_mask)}
