"""A response compared with the others to its prompt: GRPO and its relatives, RLOO, REINFORCE++ with baseline, OPO, GPG.

The score of a response is the sum of its rewards over its valid tokens. Its advantage is the same at every valid token.
A group of one has nothing to be compared with: its advantage is 0. Rows without a valid token are padding and belong to
no group. There is no critic to fit: the returns are the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.algorithms.advantages import ESTIMATOR_REGISTRY
from paceline.algorithms.groups import GroupIds, Groups
from paceline.algorithms.masking import masked_sum, masked_whiten, zero_outside

EPSILON = 1e-6
"""Added to a standard deviation that something is divided by."""


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None,
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    (score - group mean) / (group std + epsilon), over the responses with the same `index` (the prompt's uid); the
    standard deviation is the unbiased one. Without `norm_adv_by_std_in_grpo` it is score - group mean (Dr.GRPO, Liu
    et al. 2025, arXiv:2503.20783).
    """
    scores = masked_sum(token_level_rewards, response_mask, dim=-1)
    relative = _relative(scores, Groups(response_mask, index), by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
    return _at_every_token(relative, response_mask)


@ESTIMATOR_REGISTRY.register("grpo")
@ESTIMATOR_REGISTRY.register("grpo_vectorized")
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


@ESTIMATOR_REGISTRY.register("rloo")
@ESTIMATOR_REGISTRY.register("rloo_vectorized")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE leave-one-out (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).

    The score minus the mean score of the *other* responses with the same `index`. It is computed as
    n / (n - 1) * (score - group mean), which is the same number.
    """
    groups = Groups(response_mask, index)
    centred = groups.centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    size = groups.sizes(like=centred)
    return _at_every_token(centred * size / (size - 1).clamp(min=1), response_mask)


@ESTIMATOR_REGISTRY.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with the group mean as baseline (Hu et al. 2025, arXiv:2501.03262, "w/ baseline").

    score - group mean, at every valid token, then whitened over the valid tokens of the batch. As GRPO, but with one
    standard deviation for all groups, so that a group of nearly equal scores is not amplified.
    """
    centred = Groups(response_mask, index).centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    return _whitened(centred, response_mask)


@ESTIMATOR_REGISTRY.register("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None = None,
    norm_by_std: bool = True,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Credit to the best response of a group alone (pass@k as objective, arXiv:2503.19595).

    The best score minus the second best, divided by (group std + epsilon) with `norm_by_std`; 0 for all other
    responses. It is what the maximum over the group loses without this response. A tie for the best gives 0 everywhere.
    """
    groups = Groups(response_mask, index)
    scores = masked_sum(token_level_rewards, response_mask, dim=-1)
    is_best = scores == groups.max(scores)
    second = groups.max(torch.where(is_best, -torch.inf, scores))
    is_alone = (groups.sum(is_best.to(scores.dtype)) == 1) & (groups.sizes(like=scores) > 1)
    lead = torch.where(is_best & is_alone, scores - second, 0.0)
    return _at_every_token(lead / (groups.std(scores) + EPSILON) if norm_by_std else lead, response_mask)


@ESTIMATOR_REGISTRY.register("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score minus the group's mean weighted by length (OPO, arXiv:2505.23585).

    baseline = sum of tokens * score / sum of tokens over the group, where only valid tokens count: the baseline of
    least variance where the squared norm of a response's gradient grows with its length.
    """
    groups = Groups(response_mask, index)
    centred = groups.centre(masked_sum(token_level_rewards, response_mask, dim=-1))
    lengths = response_mask.bool().sum(dim=-1).to(centred.dtype)
    baseline = groups.sum(lengths * centred) / groups.sum(lengths).clamp(min=1)
    return _at_every_token(centred - baseline, response_mask)


@ESTIMATOR_REGISTRY.register("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    *, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIds | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score minus the group mean, scaled up for groups that teach nothing (GPG, arXiv:2504.02546).

    alpha * (score - group mean), alpha = responses of the batch / responses of groups whose scores differ. A group of
    equal scores has no gradient, and in a mean over the batch it would only shrink that of the others.
    """
    groups = Groups(response_mask, index)
    scores = masked_sum(token_level_rewards, response_mask, dim=-1)
    alpha = groups.is_response.sum() / groups.differ(scores).sum().clamp(min=1)
    return _at_every_token(alpha * groups.centre(scores), response_mask)


@ESTIMATOR_REGISTRY.register("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds | None = None,
    reward_components: Mapping[str, torch.Tensor] | None = None,
    component_weights: Mapping[str, float] | None = None,
    norm_by_std: bool = True,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part of the reward normalised in the group, then added up (GDPO, arXiv:2601.05242).

    With the components c_k (batch,) of the scores and their weights w_k, 1 where none is given:

        a = sum over k of w_k * (c_k - group mean) / (group std + epsilon)        at every valid token

    whitened over the valid tokens of the batch. So a component keeps its say however small its scale, and responses
    whose totals are equal but whose components differ are told apart. Without `norm_by_std` components are centred
    alone. The token rewards have no part in it.
    """
    if not reward_components:
        raise ValueError("The estimator gdpo needs the parts of the scores as reward_components; none were given.")
    groups = Groups(response_mask, index)
    total = torch.zeros(len(response_mask), dtype=token_level_rewards.dtype, device=response_mask.device)
    for name, component in reward_components.items():
        weight = (component_weights or {}).get(name, 1.0)
        total += weight * _relative(component.to(total), groups, by_std=norm_by_std)
    return _whitened(total, response_mask)


def _relative(x: torch.Tensor, groups: Groups, *, by_std: bool, epsilon: float = EPSILON) -> torch.Tensor:
    """x (batch,) minus its group's mean, divided by (its standard deviation + epsilon) if `by_std`."""
    centred = groups.centre(x)
    return centred / (groups.std(x) + epsilon) if by_std else centred


def _whitened(x: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch,) at every valid token, scaled to mean 0 and variance 1 over all of them: advantages, and returns."""
    advantages = masked_whiten(_spread(x, response_mask), response_mask)
    return advantages, advantages.clone()


def _at_every_token(x: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch,) at every valid token of its row: advantages, and the same as returns."""
    advantages = _spread(x, response_mask)
    return advantages, advantages.clone()


def _spread(x: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    return zero_outside(x.unsqueeze(-1).expand(response_mask.shape), response_mask)
