"""From token rewards to advantages and returns: GAE (with a critic), GRPO (without), and a registry for others.

All columns are (batch, response); results are 0 outside the response mask. An estimator sees the batch of a whole
step at once, because it normalises over it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.algorithms.masking import masked_sum, masked_whiten, zero_outside
from paceline.algorithms.registry import Registry


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, equations 11 and 16).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  return_t = A_t + V_t.

    "t + 1" is the next *valid* token: tokens outside the mask (padding, a tool's output between two turns) take no
    part and cost no discount. After the last valid token the value is 0, also where the length limit cut a response.

    Returns the advantages, whitened over the valid tokens of the batch, and the returns, taken before the whitening.
    """
    valid = response_mask.bool()
    rewards = zero_outside(token_level_rewards, response_mask)
    values = zero_outside(values, response_mask)
    raw_advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
        raw_advantages[:, t] = advantage
    returns = zero_outside(raw_advantages + values, response_mask)
    return masked_whiten(raw_advantages, response_mask), returns


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    The score of a response is the sum of its rewards. Its advantage, the same at every valid token, is
    (score - group mean) / (group std + epsilon), over the responses with the same `index` (the prompt's uid); the
    standard deviation is the unbiased one. Without `norm_adv_by_std_in_grpo` it is score - group mean (Dr.GRPO, Liu
    et al. 2025, arXiv:2503.20783). A group of one has nothing to be compared with: its advantage is 0. Rows without
    a valid token are padding and belong to no group.

    Returns the advantages and, as there is no critic to fit, the same numbers as returns.
    """
    if len(index) != len(response_mask):
        raise ValueError(f"index has {len(index)} group ids for {len(response_mask)} responses; give one for each.")
    group_numbers: dict[Hashable, int] = {}
    group_of_row = torch.tensor(
        [group_numbers.setdefault(group, len(group_numbers)) for group in index],
        dtype=torch.int64,
        device=response_mask.device,
    )
    is_response = response_mask.bool().any(dim=-1)
    scores = masked_sum(token_level_rewards, response_mask, dim=-1)

    def group_sum(x: torch.Tensor) -> torch.Tensor:
        """Sum over the responses of each row's group, at each row."""
        sums = torch.zeros(len(group_numbers), dtype=x.dtype, device=x.device)
        return sums.index_add(0, group_of_row, zero_outside(x, is_response))[group_of_row]

    size = group_sum(torch.ones_like(scores))
    centred = scores - group_sum(scores) / size.clamp(min=1)
    # Again, to remove the rounding error of the mean: in a group of equal scores nothing else is left to divide.
    centred = centred - group_sum(centred) / size.clamp(min=1)
    if norm_adv_by_std_in_grpo:
        std = (group_sum(centred.square()) / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std + epsilon)
    advantages = zero_outside(centred.unsqueeze(-1).expand_as(token_level_rewards), response_mask)
    return advantages, advantages.clone()


class AdvantageEstimator(Protocol):
    """How every registered estimator is called; each takes what it needs. Returns (advantages, returns)."""

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        index: np.ndarray | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        norm_by_std: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class _Entry:
    estimator: AdvantageEstimator
    needs_critic: bool


_ESTIMATORS: Registry[_Entry] = Registry("algorithm.adv_estimator")


def register_adv_estimator(name: str, *, needs_critic: bool) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make an estimator available as `algorithm.adv_estimator=name`.

    With `needs_critic` a run has a critic, and the estimator gets its `values`.
    """

    def decorate(estimator: AdvantageEstimator) -> AdvantageEstimator:
        _ESTIMATORS.register(name)(_Entry(estimator, needs_critic))
        return estimator

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError when there is none."""
    return _ESTIMATORS.get(name).estimator


def needs_critic(name: str) -> bool:
    """Whether the estimator registered as `name` needs values."""
    return _ESTIMATORS.get(name).needs_critic


def adv_estimator_names() -> tuple[str, ...]:
    """What `algorithm.adv_estimator` can be, users' own estimators included."""
    return _ESTIMATORS.names()


@register_adv_estimator("gae", needs_critic=True)
def _gae(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor | None = None,
    index: np.ndarray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    if values is None:
        raise ValueError("The estimator gae needs the critic's values; none were given. Use a critic, or grpo.")
    return compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam)


@register_adv_estimator("grpo", needs_critic=False)
def _grpo(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor | None = None,
    index: np.ndarray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_by_std: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    if index is None:
        raise ValueError("The estimator grpo needs the group ids (column uid) as index; none were given.")
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_by_std
    )
