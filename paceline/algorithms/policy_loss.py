"""Losses of the policy: PPO's clipped surrogate with dual clip, GSPO, CISPO, and a registry for others.

Metrics are sums over response tokens, to be divided by the tokens of the global mini-batch, so that the division
into micro-batches changes them as little as it changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.algorithms.aggregation import LOSS_AGG_MODES, Aggregate
from paceline.algorithms.masking import masked_mean, masked_sum, zero_outside
from paceline.catalog import LOSSES, LossEntry
from paceline.errors import ConfigError
from paceline.registry import Registry
from paceline.text import unknown_choice

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio|: e^20 is about 5e8, e^89 is infinite in float32. Far outside every clip range."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound of the log ratio of a whole response, from above: a mean over tokens, and nothing else holds it where A < 0."""


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


@dataclass(frozen=True)
class _LossEntry:
    loss: PolicyLoss
    about: LossEntry


_POLICY_LOSSES: Registry[_LossEntry] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(name: str, *, loss_agg_mode: str = "token-mean") -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a loss available as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    `loss_agg_mode` is how its token losses are aggregated where `actor_rollout_ref.actor.loss_agg_mode` is not set.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(unknown_choice("loss_agg_mode", loss_agg_mode, sorted(LOSS_AGG_MODES)))

    def decorate(loss: PolicyLoss) -> PolicyLoss:
        about = LossEntry(loss.__module__, loss_agg_mode)
        _POLICY_LOSSES.register(name)(_LossEntry(loss, about))
        LOSSES.add(name, about)
        return loss

    return decorate


def _built_in(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: the loss that the catalogue has as `name`."""

    def decorate(loss: PolicyLoss) -> PolicyLoss:
        _POLICY_LOSSES.register(name)(_LossEntry(loss, LOSSES.built_in[name]))
        return loss

    return decorate


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError when there is none."""
    return _POLICY_LOSSES.get(name).loss


def usual_loss_agg_mode(name: str) -> str:
    """How the token losses of the loss registered as `name` are aggregated unless the user says otherwise."""
    return _POLICY_LOSSES.get(name).about.loss_agg_mode


@_built_in("vanilla")
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
    old_log_prob, log_prob, advantages = _inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(single, bound), single)

    metrics = {
        "pg_clipfrac": _count(clipped > unclipped, response_mask),
        "pg_clipfrac_lower": _count((advantages < 0) & (single > bound), response_mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), response_mask),
    }
    return agg(loss), metrics


@_built_in("gspo")
def gspo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    clip_ratio_low: float,
    clip_ratio_high: float,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with one ratio for a whole response (GSPO, Zheng et al. 2025, arXiv:2507.18071).

    The ratio of a response is s = e^(mean over its tokens of log_prob - old_log_prob), equation 7, its logarithm
    limited to at most 10. Per token, with s_t = sg(s) * pi_t / sg(pi_t), where sg stops the gradient (GSPO-token,
    equations 13 and 14):

        loss_t = max(-A_t * s_t, -A_t * clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

    The value of s_t is s, so a response is clipped as a whole; its gradient is s * grad log pi_t. Where A_t is the same
    at all tokens, the mean of loss_t over the response is the sequence form max(-A * s, -A * clip(s, ...)), equation 5,
    and has its gradient, because grad s = s * mean of grad log pi_t. So `seq-mean-token-mean`, its usual
    aggregation, gives GSPO, and the token form leaves the aggregation free. There is no dual clip.

    Metrics: `pg_clipfrac`, tokens whose clipped branch is the larger one; `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = _inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = (log_prob - old_log_prob).detach()
    sequence_log_ratio = masked_mean(log_ratio, response_mask, dim=-1).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    # log_prob - sg(log_prob) is 0 with the gradient of log_prob.
    ratio = (sequence_log_ratio.unsqueeze(-1) + log_prob - log_prob.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)

    metrics = {
        "pg_clipfrac": _count(clipped > unclipped, response_mask),
        "ppo_kl": masked_sum(-log_ratio, response_mask),
    }
    return agg(torch.maximum(unclipped, clipped)), metrics


@_built_in("cispo")
def cispo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    clip_ratio_low: float,
    clip_ratio_high: float,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE with a clipped importance weight (CISPO, MiniMax 2025, arXiv:2506.13585, equations 4 and 5).

    With the ratio rho = e^(log_prob - old_log_prob), per token:

        loss = -sg(clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)) * A * log_prob

    where sg stops the gradient. The clip bounds a token's weight and, unlike PPO's, never takes its gradient away.

    Metrics: `pg_clipfrac`, tokens whose weight is clipped; `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = _inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = (log_prob - old_log_prob).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)

    metrics = {
        "pg_clipfrac": _count(weight != ratio, response_mask),
        "ppo_kl": masked_sum(-log_ratio, response_mask),
    }
    return agg(-weight * advantages * log_prob), metrics


def _inside(response_mask: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    """The columns with zeros outside the mask."""
    return [zero_outside(column, response_mask) for column in columns]


def _count(tokens: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """How many response tokens are True."""
    return masked_sum(tokens.float(), response_mask)


@torch.no_grad()
def truncated_importance_weights(
    trainer_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(pi_trainer / pi_rollout, cap) of each token: what another engine's samples weigh (Yao et al. 2025, TIS).

    A rollout engine with other kernels or another precision samples from a slightly different distribution than the
    one that is trained. The weight corrects for that; the cap bounds its variance.

    >>> truncated_importance_weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0]), cap=2.0)
    tensor([1., 2.])
    """
    log_ratio = (trainer_log_prob - rollout_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)
