"""Columns that the driver computes itself: rewards less the KL penalty, advantages and returns.

Pure functions from DataProto to DataProto; no Ray, no models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.algorithms import kl
from paceline.algorithms.advantages import estimator_needs, get_adv_estimator
from paceline.algorithms.masking import masked_mean, masked_sum, zero_outside
from paceline.algorithms.resampling import pf_ppo_rows
from paceline.config import AlgorithmConfig, PfPpoConfig
from paceline.protocol import DataProto
from paceline.trainer.ppo.corrected_columns import loss_mask_of


def compute_rewards(
    data: DataProto, algorithm: AlgorithmConfig, kl_coefficient: float
) -> tuple[DataProto, dict[str, float]]:
    """Add `token_level_rewards`: the scores, less the KL penalty where the configuration asks for it."""
    if algorithm.use_kl_in_reward:
        return subtract_kl(data, kl_coefficient, algorithm.kl_penalty)
    rewards = {"token_level_rewards": data.batch["token_level_scores"]}
    return data.union(DataProto.from_dict(tensors=rewards)), {}


def subtract_kl(data: DataProto, coefficient: float, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL divergence from the reference from the scores of each token.

    token_level_rewards = token_level_scores - coefficient * KL(old || reference), on response tokens. The metric
    `actor/reward_kl_penalty` is the mean over responses of the mean over their tokens; an empty response has none.
    """
    mask = data.batch["response_mask"]
    divergence = kl.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    divergence = zero_outside(divergence, mask)
    rewards = data.batch["token_level_scores"] - coefficient * divergence
    # A response without tokens has no divergence, which is not one of 0.
    of_each = masked_mean(divergence, mask, dim=-1)
    metrics = {
        "actor/reward_kl_penalty": masked_mean(of_each, mask.any(dim=-1)).item(),
        "actor/reward_kl_penalty_coeff": coefficient,
    }
    return data.union(DataProto.from_dict(tensors={"token_level_rewards": rewards})), metrics


def move_kl_coefficient(data: DataProto, kl_ctrl: kl.KLController, metrics: dict[str, float]) -> None:
    """Let the coefficient follow the divergence that `subtract_kl` measured on this batch."""
    num_responses = int(data.batch["response_mask"].any(dim=-1).sum())
    kl_ctrl.update(metrics["actor/reward_kl_penalty"], n_steps=num_responses)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL divergence from the reference from the scores of each token, and move the coefficient."""
    data, metrics = subtract_kl(data, kl_ctrl.value, kl_penalty)
    move_kl_coefficient(data, kl_ctrl, metrics)
    return data, metrics


def nonfinite_places(data: DataProto, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Which of these columns are NaN or infinite on a response token, with a mask of the places.

    A column that its maker found finite is not looked at again, and so need not come here.
    """
    mask = data.batch["response_mask"].bool()
    unknown = [name for name in names if name in data.batch and not data.is_known_finite(name)]
    columns = {name: data.batch[name] for name in unknown}
    columns |= {name: column.sum(dim=-1) for name, column in columns.items() if column.dim() == 3}
    broken = {
        name: ~torch.isfinite(column) & (mask if column.dim() == 2 else mask.any(dim=-1))
        for name, column in columns.items()
    }
    return {name: places for name, places in broken.items() if places.any()}


def nonfinite_problem(broken: dict[str, torch.Tensor]) -> str:
    """What `nonfinite_places` found, in words."""
    return "; ".join(
        f"{name} is not finite at {int(places.sum())} of {places.numel()} places, the first in row "
        f"{int(places.nonzero()[0][0])}"
        for name, places in broken.items()
    )


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    lam_critic: float | None = None,
    lam_length_alpha: float | None = None,
    reward_components: Mapping[str, torch.Tensor] | None = None,
    component_weights: Mapping[str, float] | None = None,
) -> DataProto:
    """Add `advantages` and `returns` by the registered estimator.

    `values`, `reward_baselines` (scores of greedy responses) and `uid` go to the estimator where the data has them;
    parts of the scores, and what is known of the policy's distribution, where it says that it needs them. Its mask is
    that of the tokens that train: a response of which none does is in no group.
    """
    needs = estimator_needs(adv_estimator)
    lambdas = {"lam_critic": lam_critic, "lam_length_alpha": lam_length_alpha}
    further: dict[str, Any] = {name: value for name, value in lambdas.items() if value is not None}
    if needs.needs_components:
        further |= {"reward_components": reward_components, "component_weights": component_weights}
    if needs.needs_sum_pi_squared:
        names = ("old_log_probs", "sum_pi_squared", "rollout_is_weights")
        further |= {name: data.batch.get(name, None) for name in names}
    advantages, returns = get_adv_estimator(adv_estimator)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=loss_mask_of(data),
        values=data.batch.get("values", None),
        index=data.non_tensor_batch.get("uid"),
        reward_baselines=data.batch.get("reward_baselines", None),
        gamma=gamma,
        lam=lam,
        norm_by_std=norm_adv_by_std_in_grpo,
        **further,
    )
    return data.union(DataProto.from_dict(tensors={"advantages": advantages, "returns": returns}))


def component_metrics(components: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Mean, deviation and range over the batch of each part of the scores."""
    return {
        f"gdpo/{name}/{kind}": value.item()
        for name, part in components.items()
        for kind, value in {"mean": part.mean(), "std": part.std(), "max": part.max(), "min": part.min()}.items()
    }


def mean_sum_pi_squared(data: DataProto) -> dict[str, float]:
    """The mean over response tokens of the summed squared probabilities, where they are known: 1 is certainty."""
    if "sum_pi_squared" not in data.batch:
        return {}
    return {"actor/sum_pi_squared": masked_mean(data.batch["sum_pi_squared"], data.batch["response_mask"]).item()}


def draw_rows(data: DataProto, settings: PfPpoConfig, *, seed: int, step: int) -> np.ndarray:
    """The rows that PF-PPO trains on, by the rewards of whole responses; the same for the same seed and step."""
    mask = loss_mask_of(data)
    return pf_ppo_rows(
        masked_sum(data.batch["token_level_rewards"], mask, dim=-1).numpy(),
        mask.bool().any(dim=-1).numpy(),
        settings.reweight_method,
        settings.weight_pow,
        seed=[seed, step],
    )
