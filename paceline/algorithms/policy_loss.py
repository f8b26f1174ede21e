"""How a loss of the policy is called, and those that clip a ratio: PPO's surrogate with dual clip, GSPO, CISPO, GMPO.

Others are in `unclipped_losses` and `covariance_losses`.

Metrics are sums over response tokens, to be divided by the tokens of the global mini-batch, so that the division
into micro-batches changes them as little as it changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from paceline.algorithms.aggregation import LOSS_AGG_MODES, Aggregate
from paceline.algorithms.masking import masked_mean, masked_sum, zero_outside
from paceline.catalog import LOSSES, LossEntry, Registry
from paceline.errors import ConfigError
from paceline.text import unknown_choice

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio|: e^20 is about 5e8, e^89 is infinite in float32. Far outside every clip range."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Bound of the log ratio of a whole response, from above: a mean over tokens, and nothing else holds it where A < 0."""


class PolicyLoss(Protocol):
    """How every registered policy loss is called, with (micro-batch, response) tensors; each takes what it needs.

    `response_mask` is 1 on the tokens that train. `agg` aggregates a matrix of token losses: it applies importance
    weights and divides by counts of the mini-batch. `chosen` is True on the tokens of the mini-batch that a loss with
    `chooses_tokens` treats in another way. The others are settings of the same names. Returns the loss and detached
    sums over response tokens.
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
        chosen: torch.Tensor | None = None,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        ppo_kl_coef: float = 0.1,
        dro_beta: float | None = None,
        loss_type: str = "ppo_clip",
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


POLICY_LOSSES: Registry[PolicyLoss, LossEntry] = Registry(LOSSES)
"""The losses by name; the built-in ones of other modules are registered when they are first asked for."""


def register_policy_loss(name: str, *, loss_agg_mode: str = "token-mean") -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a loss available as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    `loss_agg_mode` is how its token losses are aggregated where `actor_rollout_ref.actor.loss_agg_mode` is not set.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(unknown_choice("loss_agg_mode", loss_agg_mode, sorted(LOSS_AGG_MODES)))
    return POLICY_LOSSES.register(name, LossEntry(loss_agg_mode=loss_agg_mode))


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError when there is none."""
    return POLICY_LOSSES.get(name)


def loss_traits(name: str) -> LossEntry:
    """What the loss registered as `name` does in its own way, unless the user says otherwise."""
    return POLICY_LOSSES.entry(name)


def loss_in_use(loss_mode: str, *, bypass: bool) -> str:
    """The loss that a run uses: where the rollout's log-probs are the old ones, bypass_mode in place of vanilla.

    >>> loss_in_use("vanilla", bypass=True), loss_in_use("gspo", bypass=True)
    ('bypass_mode', 'gspo')
    """
    return "bypass_mode" if bypass and loss_mode == "vanilla" else loss_mode


@POLICY_LOSSES.register("vanilla")
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
    **_: object,
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
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(single, bound), single)

    metrics = {
        "pg_clipfrac": count(clipped > unclipped, response_mask),
        "pg_clipfrac_lower": count((advantages < 0) & (single > bound), response_mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), response_mask),
    }
    return agg(loss), metrics


@POLICY_LOSSES.register("gspo")
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
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = (log_prob - old_log_prob).detach()
    sequence_log_ratio = masked_mean(log_ratio, response_mask, dim=-1).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    # log_prob - sg(log_prob) is 0 with the gradient of log_prob.
    ratio = (sequence_log_ratio.unsqueeze(-1) + log_prob - log_prob.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)

    metrics = {
        "pg_clipfrac": count(clipped > unclipped, response_mask),
        "ppo_kl": masked_sum(-log_ratio, response_mask),
    }
    return agg(torch.maximum(unclipped, clipped)), metrics


@POLICY_LOSSES.register("cispo")
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
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = (log_prob - old_log_prob).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)

    metrics = {
        "pg_clipfrac": count(weight != ratio, response_mask),
        "ppo_kl": masked_sum(-log_ratio, response_mask),
    }
    return agg(-weight * advantages * log_prob), metrics


@POLICY_LOSSES.register("geo_mean")
def geo_mean_policy_loss(
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
    """The geometric mean of a response's clipped ratios (GMPO, Zhao et al. 2025, arXiv:2507.20673).

    With x = log_prob - old_log_prob of each token, clipped where PPO would clip, but in logarithms:

        y    = min(x, clip_ratio_high) where A > 0,  max(x, -clip_ratio_low) where A < 0,  0 where A = 0
        loss = -(mean of A over the response) * e^(mean of y over the response),  the same at each of its tokens

    So `seq-mean-token-mean`, its usual aggregation, is the mean over responses. It is meant for advantages that are
    the same at all tokens of a response.

    Metrics: `pg_clipfrac`, tokens that the clip holds; `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)

    log_ratio = log_prob - old_log_prob
    held = torch.where(advantages > 0, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    held = torch.where(advantages == 0, 0.0, held)
    ratio = masked_mean(held, response_mask, dim=-1).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss = -masked_mean(advantages, response_mask, dim=-1) * ratio

    metrics = {
        "pg_clipfrac": count((held != log_ratio) & (advantages != 0), response_mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), response_mask),
    }
    return agg(loss.unsqueeze(-1).expand_as(advantages)), metrics


def inside(response_mask: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    """The columns with zeros outside the mask."""
    return [zero_outside(column, response_mask) for column in columns]


def count(tokens: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """How many response tokens are True."""
    return masked_sum(tokens.float(), response_mask)
