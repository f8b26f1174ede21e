"""What the samples of another distribution are worth: importance weights and rejection.

A rollout engine with other kernels, another precision or older weights samples from another distribution than the one
that is trained. With r = pi_trainer / pi_rollout of each sampled token, `importance_weights` says what a token weighs
and `kept_tokens` which tokens train at all. Everything is (batch, response), without gradient, and token by token or
row by row, but for the mean weight of a batch.

`log_ratio` is log r, zero outside the mask: see `log_ratio_of`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.algorithms.masking import masked_mean, zero_outside

MAX_LOG_RATIO = 20.0
"""Bound of |log r|, of a token and of the sum over a response, so that r stays finite."""
SMALLEST_MEAN = 1e-8
"""Below it, weights are not divided by their mean."""
SMALLEST_WEIGHT = 1e-10
"""In place of a weight of 0 in a geometric mean."""


@dataclass(frozen=True)
class Rejection:
    """A criterion, and the values of its statistic that are kept, the bounds included.

    >>> Rejection.of_ratio("token_k1", 0.5, 2.0)
    Rejection(criterion='token_k1', low=-0.6931471805599453, high=0.6931471805599453)
    """

    criterion: str
    low: float
    high: float

    @classmethod
    def of_ratio(cls, criterion: str, low: float, high: float) -> Rejection:
        """With bounds of r itself, for k1, which is -log r."""
        return cls(criterion, -math.log(high), -math.log(low))


@dataclass(frozen=True)
class RolloutCorrection:
    """All settings; as it is made, nothing is corrected."""

    level: Literal["token", "sequence"] | None = None
    """Of what r is taken for the weight: a token, or a whole response. None: there are no weights."""
    low: float | None = None
    """Weights below are 0, and so are those above `high` (IcePop). None: those above are `high` (truncation)."""
    high: float = 2.0
    normalise: bool = False
    """Divide the weights by their mean over the batch."""
    rejections: tuple[Rejection, ...] = ()
    """A token is kept if all agree."""
    bypass: bool = False
    """The rollout's log-probs are the old ones; weights and rejection are those of the policy under update."""
    loss_type: str = "ppo_clip"
    """Of bypass: see `unclipped_losses.bypass_policy_loss`."""

    @property
    def is_on(self) -> bool:
        return self.level is not None or bool(self.rejections)

    @property
    def weighs_in_update(self) -> bool:
        """Whether weights are made by the update: PPO's ratio to the rollout needs none."""
        return self.bypass and self.level is not None and self.loss_type == "reinforce"


NO_CORRECTION = RolloutCorrection()


def log_ratio_of(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log r of each token from both log-probs."""
    return zero_outside(trainer, mask) - zero_outside(rollout, mask)


# ---------------------------------------------------------------------------------------------- importance weights


@torch.no_grad()
def raw_weights(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """r of each token, or at each token that of its whole response; 0 outside the mask."""
    exponent = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio) if level == "sequence" else log_ratio
    return zero_outside(exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), mask)


def bounded(weights: torch.Tensor, low: float | None, high: float) -> torch.Tensor:
    """At most `high` (truncated importance sampling, Yao et al. 2025) or, with `low`, 0 outside of both bounds
    (IcePop, arXiv:2510.18855).

    >>> bounded(torch.tensor([0.1, 1.0, 9.0]), None, 2.0), bounded(torch.tensor([0.1, 1.0, 9.0]), 0.5, 2.0)
    (tensor([0.1000, 1.0000, 2.0000]), tensor([0., 1., 0.]))
    """
    if low is None:
        return weights.clamp(max=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def mean_weight(weights: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Over tokens or, for weights of whole responses, over responses."""
    if level == "token":
        return masked_mean(weights, mask)
    return masked_mean(masked_mean(weights, mask, dim=-1), mask.bool().any(dim=-1))


@torch.no_grad()
def importance_weights(log_ratio: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrection) -> torch.Tensor:
    """What each token weighs, before a division by the mean; 0 outside the mask."""
    assert correction.level is not None
    return bounded(raw_weights(log_ratio, mask, correction.level), correction.low, correction.high)


@torch.no_grad()
def normalised(weights: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """The weights of a batch divided by their mean; as they are, if that is 0."""
    mean = mean_weight(weights, mask, level)
    return torch.where(mean > SMALLEST_MEAN, weights / mean, weights)


def response_weights(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """At every token the geometric mean of its response's weights."""
    logarithms = masked_mean((weights + SMALLEST_WEIGHT).log(), mask, dim=-1)
    return zero_outside(logarithms.exp().unsqueeze(-1).expand_as(weights), mask)


# ------------------------------------------------------------------------------------------------------- rejection


def statistic(log_ratio: torch.Tensor, mask: torch.Tensor, criterion: str) -> torch.Tensor:
    """What a criterion looks at, of a token or at each token of its response; 0 outside the mask.

    Of a token, with c = log r limited to ±20: k1 = -c, k2 = c^2 / 2, k3 = e^c - 1 - c. All estimate the KL divergence
    of the rollout from the trainer. `seq_sum`, `seq_mean` and `seq_max` are over the tokens of a response.
    """
    scope, _, kind = criterion.rpartition("_")
    c = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_token = zero_outside({"k1": -c, "k2": c.square() / 2, "k3": torch.expm1(c) - c}[kind], mask)
    if scope == "token":
        return of_token
    of_response = {
        "seq_sum": of_token.sum(dim=-1),
        "seq_mean": masked_mean(of_token, mask, dim=-1),
        "seq_max": of_token.amax(dim=-1),  # k2 and k3 are never negative, so 0 outside the mask is no maximum
    }[scope]
    return zero_outside(of_response.unsqueeze(-1).expand_as(of_token), mask)


@torch.no_grad()
def kept_tokens(log_ratio: torch.Tensor, mask: torch.Tensor, rejections: tuple[Rejection, ...]) -> torch.Tensor:
    """The mask of the tokens that every criterion keeps, in the mask's dtype."""
    kept = mask.bool()
    for rejection in rejections:
        found = statistic(log_ratio, mask, rejection.criterion)
        kept = kept & (found >= rejection.low) & (found <= rejection.high)
    return kept.to(mask.dtype)


def rewards_on_kept(rewards: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rewards of rejected tokens at the last kept token before them, or at the first kept one: no sum changes.

    A response of which nothing is kept keeps its rewards where they are.

    >>> kept = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])
    >>> rewards_on_kept(torch.tensor([[1.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 7.0]]), torch.ones(2, 4), kept)
    tensor([[0., 1., 5., 0.],
            [0., 0., 0., 7.]])
    """
    is_kept = kept.bool()
    positions = torch.arange(rewards.shape[-1], device=rewards.device).expand_as(rewards)
    last_kept = positions.masked_fill(~is_kept, -1).cummax(dim=-1).values
    first_kept = is_kept.int().argmax(dim=-1, keepdim=True).expand_as(rewards)
    target = torch.where(last_kept >= 0, last_kept, first_kept)
    target = torch.where(is_kept.any(dim=-1, keepdim=True), target, positions)
    return torch.zeros_like(rewards).scatter_add(-1, target, zero_outside(rewards, mask))
