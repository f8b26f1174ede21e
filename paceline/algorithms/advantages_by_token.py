"""Rewards added up from each token on: GAE, REINFORCE++, ReMax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.algorithms.advantages import ESTIMATOR_REGISTRY
from paceline.algorithms.masking import masked_whiten, return_to_go, zero_outside


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    lam_critic: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, equations 11 and 16).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  return_t = A_t + V_t.

    "t + 1" is the next *valid* token: tokens outside the mask (padding, a tool's output between two turns) take no
    part and cost no discount. After the last valid token the value is 0, also where the length limit cut a response.
    `lam` is one number, or one for each row (batch,). With `lam_critic` the returns are of advantages with that one
    (decoupled GAE of VAPO, arXiv:2504.05118).

    Returns the advantages, whitened over the valid tokens of the batch, and the returns, taken before the whitening.
    """
    rewards = zero_outside(token_level_rewards, response_mask)
    values = zero_outside(values, response_mask)
    deltas = rewards + gamma * _next_valid(values, response_mask) - values
    raw_advantages = return_to_go(deltas, response_mask, gamma * lam)
    of_critic = raw_advantages if lam_critic is None else return_to_go(deltas, response_mask, gamma * lam_critic)
    returns = zero_outside(of_critic + values, response_mask)
    return masked_whiten(raw_advantages, response_mask), returns


def length_adaptive_lam(response_mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """A lambda for each row (batch,), in float64: 1 - 1 / (alpha * its valid tokens), at least 0 (VAPO).

    So the horizon of the advantages grows with the length of the response.

    >>> length_adaptive_lam(torch.ones(1, 1000), alpha=0.05).item()
    0.98
    """
    return (1 - 1 / (alpha * response_mask.bool().sum(dim=-1).double())).clamp(min=0.0)


@ESTIMATOR_REGISTRY.register("gae")
def _gae(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    lam_critic: float | None = None,
    lam_length_alpha: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    if values is None:
        raise ValueError("The estimator gae needs the critic's values; none were given. Use a critic, or grpo.")
    if lam_length_alpha is None:
        return compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam, lam_critic)
    of_policy = length_adaptive_lam(response_mask, lam_length_alpha).to(values.dtype)
    of_critic = lam if lam_critic is None else lam_critic
    return compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, of_policy, of_critic)


@ESTIMATOR_REGISTRY.register("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with advantages normalised over the batch (REINFORCE++, Hu et al. 2025, arXiv:2501.03262).

    return_t = r_t + gamma * return_{t+1}, where t + 1 is the next valid token. The advantages are the returns, whitened
    over the valid tokens of the batch: its mean is the baseline.

    Returns the advantages and the returns before the whitening.
    """
    returns = return_to_go(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns


@ESTIMATOR_REGISTRY.register("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    reward_baselines: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with the greedy response's score as baseline (ReMax, Li et al. 2023, arXiv:2310.10505, algorithm 1).

    return_t is the sum of the rewards from t on, without discount; the advantage is return_t minus the score of the
    greedy response to the same prompt, `reward_baselines` (batch,). Nothing is normalised. With the reward at the last
    token alone, it is score - greedy score at every token.

    Returns the advantages and the returns.
    """
    if reward_baselines is None:
        raise ValueError(
            "The estimator remax needs the scores of the greedy responses as reward_baselines; none were given."
        )
    if reward_baselines.shape != response_mask.shape[:1]:
        raise ValueError(
            f"reward_baselines has shape {tuple(reward_baselines.shape)} for {len(response_mask)} responses; "
            f"give one score for each, ({len(response_mask)},)."
        )
    returns = return_to_go(token_level_rewards, response_mask, discount=1.0)
    return zero_outside(returns - reward_baselines.unsqueeze(-1), response_mask), returns


def _next_valid(x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """What x is at the next valid token after each; 0 where there is none."""
    width = x.shape[1]
    positions = torch.arange(width, device=x.device).expand_as(x)
    # Reversed, the running minimum is the first valid position from t on; `width` stands for none and holds a 0.
    from_t_on = positions.masked_fill(~response_mask.bool(), width).flip(-1).cummin(-1).values.flip(-1)
    after_t = F.pad(from_t_on[:, 1:], (0, 1), value=width)
    return F.pad(x, (0, 1)).gather(-1, after_t)
