"""Losses that hold back a few tokens whose log-prob and advantage are high together (Cui et al., arXiv:2505.22617).

Such tokens lower the entropy most. They are chosen before the update, over the whole mini-batch and from the log-probs
of the old policy, so that neither micro-batches nor the number of devices change the choice.
"""

from __future__ import annotations

import torch

from paceline.algorithms.aggregation import Aggregate
from paceline.algorithms.masking import masked_mean, masked_sum, zero_outside
from paceline.algorithms.policy_loss import MAX_LOG_RATIO, POLICY_LOSSES, count, inside

# ------------------------------------------------------------------------------------------------------ the choice


def covariances(log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(A - mean of A) * (log_prob - mean of log_prob) of each valid token, both means over all of them; 0 elsewhere."""
    log_prob, advantages = inside(mask, log_prob, advantages)
    centred = (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))
    return zero_outside(centred, mask)


def choose_at_random(
    covariance: torch.Tensor,
    mask: torch.Tensor,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """For clip_cov: a share of all tokens, at least one, drawn from those with low < covariance < high."""
    candidates = (mask.bool() & (covariance > low) & (covariance < high)).nonzero()
    order = torch.randperm(len(candidates), generator=generator)
    return _marked(candidates[order[: _num_chosen(mask, share)]], mask)


def choose_largest(covariance: torch.Tensor, mask: torch.Tensor, *, share: float) -> torch.Tensor:
    """For kl_cov: the share of all tokens, at least one, with the largest covariance; of equal ones the first."""
    tokens = mask.bool().nonzero()
    order = covariance[mask.bool()].argsort(descending=True, stable=True)
    return _marked(tokens[order[: _num_chosen(mask, share)]], mask)


def _num_chosen(mask: torch.Tensor, share: float) -> int:
    return max(int(share * int(mask.bool().sum())), 1)


def _marked(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """True at these (row, position) pairs."""
    chosen = torch.zeros_like(mask, dtype=torch.bool)
    chosen[tokens[:, 0], tokens[:, 1]] = True
    return chosen


# ------------------------------------------------------------------------------------------------------ the losses


@POLICY_LOSSES.register("clip_cov")
def clip_cov_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    clip_ratio_low: float,
    clip_ratio_high: float,
    chosen: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate, with loss and gradient 0 on the chosen tokens.

        loss = max(-A * rho, -A * clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))

    There is no dual clip.

    Metrics: `pg_clipfrac`, chosen tokens; `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    chosen = _given(chosen, response_mask)

    log_ratio = log_prob - old_log_prob
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)

    metrics = {
        "pg_clipfrac": count(chosen, response_mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), response_mask),
    }
    return agg(torch.where(chosen, 0.0, loss)), metrics


@POLICY_LOSSES.register("kl_cov")
def kl_cov_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    ppo_kl_coef: float = 0.1,
    chosen: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The surrogate without any clip, and a penalty on the chosen tokens.

        loss = -A * rho,  plus ppo_kl_coef * |log_prob - old_log_prob| where chosen

    Metrics: `kl_cov_frac`, chosen tokens; `ppo_kl`, |log_prob - old_log_prob|.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    chosen = _given(chosen, response_mask)

    log_ratio = log_prob - old_log_prob
    penalty = torch.where(chosen, ppo_kl_coef * log_ratio.abs(), 0.0)

    metrics = {
        "kl_cov_frac": count(chosen, response_mask),
        "ppo_kl": masked_sum(log_ratio.detach().abs(), response_mask),
    }
    return agg(-advantages * _ratio(log_ratio) + penalty), metrics


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _given(chosen: torch.Tensor | None, response_mask: torch.Tensor) -> torch.Tensor:
    if chosen is None:
        raise ValueError(
            "This loss needs the tokens that were chosen over the mini-batch, as `chosen`; none were given."
        )
    return zero_outside(chosen, response_mask)
