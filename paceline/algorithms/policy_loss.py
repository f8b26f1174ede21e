"""Losses of the policy: PPO's clipped surrogate with dual clip, and a registry for others.

Metrics are sums over response tokens, to be divided by the tokens of the global mini-batch, so that the division
into micro-batches changes them as little as it changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from paceline.algorithms.aggregation import Aggregate
from paceline.algorithms.masking import masked_sum, zero_outside
from paceline.algorithms.registry import Registry
from paceline.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio|: e^20 is about 5e8, e^89 is infinite in float32. Far outside every clip range."""


class PolicyLoss(Protocol):
    """How every registered policy loss is called, with (micro-batch, response) tensors.

    `agg` aggregates a matrix of token losses. Returns the loss and detached sums over response tokens.
    """

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        *,
        agg: Aggregate,
        clip_ratio_low: float,
        clip_ratio_high: float,
        clip_ratio_c: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


_POLICY_LOSSES: Registry[PolicyLoss] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a loss available as `actor_rollout_ref.actor.policy_loss.loss_mode=name`."""
    return _POLICY_LOSSES.register(name)


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError when there is none."""
    return _POLICY_LOSSES.get(name)


def policy_loss_names() -> tuple[str, ...]:
    """What `policy_loss.loss_mode` can be, users' own losses included."""
    return _POLICY_LOSSES.names()


@register_policy_loss("vanilla")
def clipped_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7) with dual clip.

    With the ratio rho = e^(log_prob - old_log_prob), its logarithm limited to ±20, per token:

        loss = max(-A * rho, -A * clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))

    and where A < 0, since rho is unbounded there, at most clip_ratio_c * |A| (dual clip, Ye et al. 2019,
    arXiv:1912.09729, equation 5). Clip ranges that differ are DAPO's "clip-higher" (Yu et al. 2025, arXiv:2503.14476).

    Metrics: `pg_clipfrac`, tokens whose clipped branch is the larger one; `pg_clipfrac_lower`, tokens that the dual
    clip holds; `ppo_kl`, old_log_prob - log_prob. On both kinds of clipped tokens the gradient is zero.
    """
    if not clip_ratio_c > 1:
        raise ConfigError(f"clip_ratio_c is {clip_ratio_c}; at 1 or below it stops all learning. Set it above 1.")
    old_log_prob = zero_outside(old_log_prob, response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    advantages = zero_outside(advantages, response_mask)

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(single, bound), single)

    with torch.no_grad():
        metrics = {
            "pg_clipfrac": masked_sum((clipped > unclipped).float(), response_mask),
            "pg_clipfrac_lower": masked_sum(((advantages < 0) & (single > bound)).float(), response_mask),
            "ppo_kl": masked_sum(-log_ratio, response_mask),
        }
    return agg(loss), metrics
