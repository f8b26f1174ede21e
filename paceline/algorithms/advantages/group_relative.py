"""Estimators that compare a response with the others to the same prompt: GRPO, RLOO, REINFORCE++ with baseline."""

from __future__ import annotations

import torch

from paceline.algorithms.advantages.estimators import built_in_estimator
from paceline.algorithms.groups import GroupIds, Groups
from paceline.algorithms.masking import masked_sum, masked_whiten, zero_outside


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None,
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
    groups = Groups(response_mask, index)
    centred = groups.centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    if norm_adv_by_std_in_grpo:
        variance = groups.sum(centred.square()) / (groups.sizes(like=centred) - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + epsilon)
    advantages = _at_every_token(centred, response_mask)
    return advantages, advantages.clone()


@built_in_estimator("grpo")
def _grpo(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None = None,
    norm_by_std: bool = True,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_by_std
    )


@built_in_estimator("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE leave-one-out (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).

    The advantage of a response, the same at every valid token, is its score (the sum of its rewards) minus the mean
    score of the *other* responses with the same `index`. It is computed as n / (n - 1) * (score - group mean), which
    is the same number. A group of one has no others: its advantage is 0.

    Returns the advantages and the same numbers as returns.
    """
    groups = Groups(response_mask, index)
    centred = groups.centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    size = groups.sizes(like=centred)
    advantages = _at_every_token(centred * size / (size - 1).clamp(min=1), response_mask)
    return advantages, advantages.clone()


@built_in_estimator("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with the group mean as baseline (Hu et al. 2025, arXiv:2501.03262, "w/ baseline").

    score - group mean, at every valid token, then whitened over the valid tokens of the batch. As GRPO, but with one
    standard deviation for all groups, so that a group of nearly equal scores is not amplified.

    Returns the advantages and the same numbers as returns.
    """
    centred = Groups(response_mask, index).centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    advantages = masked_whiten(_at_every_token(centred, response_mask), response_mask)
    return advantages, advantages.clone()


def _at_every_token(x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """x (batch,) at every valid token of its row."""
    return zero_outside(x.unsqueeze(-1).expand(response_mask.shape), response_mask)
