"""Losses of the policy that do not clip a ratio: they gate or mask tokens in another way, or trust the data.

How a loss is called stands in `policy_loss`.
"""

from __future__ import annotations

import torch

from paceline.algorithms.aggregation import Aggregate
from paceline.algorithms.masking import masked_sum
from paceline.algorithms.policy_loss import MAX_LOG_RATIO, POLICY_LOSSES, clipped_policy_loss, count, inside
from paceline.errors import ConfigError

SMALLEST_PROBABILITY = 1e-8
"""Keeps the logarithm of 1 - p finite."""


@POLICY_LOSSES.register("gpg")
def gpg_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE: loss = -A * log_prob (GPG, Chu et al. 2025, arXiv:2504.02546).

    Metrics: `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    return agg(-advantages * log_prob), _ppo_kl(old_log_prob, log_prob, response_mask)


@POLICY_LOSSES.register("bypass_mode")
def bypass_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    loss_type: str = "ppo_clip",
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """For old log-probs that are the rollout's own: no forward pass has computed those of the trainer.

    With `ppo_clip` the clipped surrogate, whose ratio holds the importance weight already; with `reinforce`
    -A * log_prob, for which `agg` applies the weights. Rejected tokens are outside the mask.
    """
    loss = gpg_policy_loss if loss_type == "reinforce" else clipped_policy_loss
    return loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        agg=agg,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )


@POLICY_LOSSES.register("dro")
def dro_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    dro_beta: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A quadratic pull to the old policy instead of a clip (DRO, Richemond et al. 2024, arXiv:2405.19107).

        loss = -(A * log_prob - dro_beta / 2 * (log_prob - old_log_prob)^2)

    Its minimum, token by token, is at log_prob = old_log_prob + A / dro_beta.

    Metrics: `ppo_kl`, old_log_prob - log_prob.
    """
    if dro_beta is None or not dro_beta > 0:
        raise ConfigError(f"dro_beta is {dro_beta}; the loss dro pulls with it to the old policy. Set it above 0.")
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    loss = -(advantages * log_prob - dro_beta / 2 * (log_prob - old_log_prob).square())
    return agg(loss), _ppo_kl(old_log_prob, log_prob, response_mask)


@POLICY_LOSSES.register("sapo")
def sapo_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    agg: Aggregate,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **_: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A smooth gate instead of a clip (SAPO, Gao et al. 2025, arXiv:2511.20347).

    With rho = e^(log_prob - old_log_prob), its logarithm limited to ±20, and tau = tau_pos where A > 0, else tau_neg:

        loss = -A * 4 / tau * sigmoid(tau * (rho - 1))

    The gradient is that of -A * rho at rho = 1 and fades on both sides, the sooner the larger tau is.

    Metrics: `ppo_kl`, old_log_prob - log_prob.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_pos), tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return agg(-gate * advantages), _ppo_kl(old_log_prob, log_prob, response_mask)


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv_policy_loss(
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
    """Tokens whose probability has moved too far are masked (DPPO with total variation, arXiv:2602.04879).

    With the probabilities p = e^log_prob and p_old, a token is kept while

        p - p_old <= clip_ratio_high  where A > 0,      p_old - p <= clip_ratio_low  elsewhere

    and what is kept has the loss of `_masked_reinforce`.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    moved = log_prob.detach().exp() - old_log_prob.exp()
    kept = torch.where(advantages > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low)
    return _masked_reinforce(old_log_prob, log_prob, advantages, response_mask, kept, agg, clip_ratio_c)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl_policy_loss(
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
    """As `dppo_tv`, with the KL divergence between "this token" and "any other" under both policies:

        k = p_old * (old_log_prob - log_prob) + (1 - p_old) * log((1 - p_old) / (1 - p))

    A token is kept while k is at most clip_ratio_high where A > 0, clip_ratio_low elsewhere; and always where its
    probability moved against its advantage.
    """
    old_log_prob, log_prob, advantages = inside(response_mask, old_log_prob, log_prob, advantages)
    now, old = log_prob.detach().exp(), old_log_prob.exp()
    others = ((1 - old + SMALLEST_PROBABILITY) / (1 - now + SMALLEST_PROBABILITY)).log()
    divergence = old * (old_log_prob - log_prob.detach()) + (1 - old) * others
    rises = (divergence <= clip_ratio_high) | (now <= old)
    falls = (divergence <= clip_ratio_low) | (now >= old)
    kept = torch.where(advantages > 0, rises, falls)
    return _masked_reinforce(old_log_prob, log_prob, advantages, response_mask, kept, agg, clip_ratio_c)


def _masked_reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    kept: torch.Tensor,
    agg: Aggregate,
    clip_ratio_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """loss = -A * sg(min(rho, clip_ratio_c)) * log_prob on the kept tokens, 0 on the others; sg stops the gradient.

    Metrics: `pg_clipfrac`, tokens that are masked; `pg_clipfrac_lower`, kept tokens whose ratio clip_ratio_c bounds;
    `ppo_kl`, old_log_prob - log_prob.
    """
    ratio = (log_prob - old_log_prob).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = -advantages * ratio.clamp(max=clip_ratio_c) * log_prob
    metrics = {
        "pg_clipfrac": count(~kept, response_mask),
        "pg_clipfrac_lower": count(kept & (ratio > clip_ratio_c), response_mask),
        **_ppo_kl(old_log_prob, log_prob, response_mask),
    }
    return agg(torch.where(kept, loss, 0.0)), metrics


def _ppo_kl(old_log_prob: torch.Tensor, log_prob: torch.Tensor, response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"ppo_kl": masked_sum(old_log_prob - log_prob.detach(), response_mask)}
