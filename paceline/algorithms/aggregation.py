"""From a matrix of token losses to one number, in a way that no division into micro-batches or ranks can change.

Averaging over each micro-batch and then over micro-batches weighs tokens by the accident of which batch they fell
into. Here every micro-batch divides by counts of the *global* mini-batch, so its result is a share and shares add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch

from paceline.algorithms.masking import masked_mean, masked_sum
from paceline.catalog import LossAggMode
from paceline.errors import ConfigError
from paceline.text import unknown_choice

LOSS_AGG_MODES = get_args(LossAggMode)

Aggregate = Callable[[torch.Tensor], torch.Tensor]
"""Aggregates a (micro-batch, response) matrix to a scalar: `agg_loss` with mask, mode and normaliser filled in."""


@dataclass(frozen=True)
class LossNormaliser:
    """What a loss is divided by: counts over the global mini-batch, all ranks and micro-batches together.

    Responses of 2, 1 and 0 tokens in columns of 3, and a row of padding: LossNormaliser(3.0, 2.0, 3).
    """

    num_tokens: float
    """Valid response tokens."""
    num_sequences: float
    """Sequences with at least one valid token; neither padding nor an empty response counts."""
    length: float
    """The constant of seq-mean-token-sum-norm: the width of the response columns, unless another is given."""


def agg_loss(loss_mat: torch.Tensor, loss_mask: torch.Tensor, mode: str, normaliser: LossNormaliser) -> torch.Tensor:
    """This micro-batch's share of the mini-batch's aggregated loss; the sum over micro-batches and ranks is the loss.

    With N_tok, N_seq and L of the normaliser, and all sums over valid tokens:

    - ``token-mean``: sum of all / N_tok. Every token weighs the same (DAPO, Yu et al. 2025, arXiv:2503.14476).
    - ``token-sum``: the sum of all. The gradient grows with the mini-batch.
    - ``seq-mean-token-sum``: sum of all / N_seq. Long sequences weigh more.
    - ``seq-mean-token-mean``: sum over sequences of the mean of each / N_seq. Every sequence weighs the same
      (GRPO, Shao et al. 2024, arXiv:2402.03300).
    - ``seq-mean-token-sum-norm``: sum of all / (N_seq * L). As token-sum, with the scale of a mean that does not
      depend on lengths (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783).

    A mini-batch without any valid token has loss 0.
    """
    # The counts are whole numbers, so max(count, 1) changes only a count of zero.
    num_sequences = max(normaliser.num_sequences, 1.0)
    if mode == "token-mean":
        return masked_sum(loss_mat, loss_mask) / max(normaliser.num_tokens, 1.0)
    if mode == "token-sum":
        return masked_sum(loss_mat, loss_mask)
    if mode == "seq-mean-token-sum":
        return masked_sum(loss_mat, loss_mask) / num_sequences
    if mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, loss_mask, dim=-1).sum() / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(loss_mat, loss_mask) / (num_sequences * normaliser.length)
    raise ConfigError(unknown_choice("loss_agg_mode", mode, sorted(LOSS_AGG_MODES)))
