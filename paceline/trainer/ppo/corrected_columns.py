"""Columns that say which samples train and what they weigh: rollout correction, and tokens of high covariance.

Pure functions from DataProto to DataProto or tensors; no Ray, no models.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.algorithms.correction_metrics import correction_metrics
from paceline.algorithms.covariance_losses import choose_at_random, choose_largest, covariances
from paceline.algorithms.rollout_correction import (
    Rejection,
    RolloutCorrection,
    importance_weights,
    kept_tokens,
    log_ratio_of,
    normalised,
    rewards_on_kept,
)
from paceline.config import PolicyLossConfig, PPOConfig
from paceline.config.thresholds import read_bounds, read_rejections
from paceline.protocol import DataProto


def correction_of(config: PPOConfig) -> RolloutCorrection:
    """What the configuration asks for, `tis_imp_ratio_cap` included."""
    section, cap = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.tis_imp_ratio_cap
    level = section.rollout_is or ("token" if cap > 0 else None)
    low, high = read_bounds(cap if section.rollout_is is None and cap > 0 else section.rollout_is_threshold)
    rejections = [
        Rejection.of_ratio(name, lowest, highest) if name.endswith("k1") else Rejection(name, lowest, highest)
        for name, lowest, highest in read_rejections(section.rollout_rs, section.rollout_rs_threshold)
    ]
    return RolloutCorrection(
        level=level,
        low=low,
        high=high,
        normalise=section.rollout_is_batch_normalize,
        rejections=tuple(rejections),
        bypass=section.bypass_mode,
        loss_type=section.loss_type,
    )


def correct_rollout(data: DataProto, correction: RolloutCorrection) -> tuple[DataProto, dict[str, float]]:
    """Add `rollout_is_weights` and `loss_mask`, as the correction asks, and measure; if both log-probs are there.

    `loss_mask` is the mask of the tokens that are kept. The rewards of the others go to tokens that are kept, so that a
    response loses none with a token.
    """
    if not {"old_log_probs", "rollout_log_probs"} <= set(data.batch.keys()):
        return data, {}
    mask, trainer, rollout = (data.batch[name] for name in ("response_mask", "old_log_probs", "rollout_log_probs"))
    log_ratio = log_ratio_of(trainer, rollout, mask)
    columns = {}
    if correction.level is not None:
        weights = importance_weights(log_ratio, mask, correction)
        columns["rollout_is_weights"] = normalised(weights, mask, correction.level) if correction.normalise else weights
    if correction.rejections:
        kept = columns["loss_mask"] = kept_tokens(log_ratio, mask, correction.rejections)
        data = data.select()
        data.batch["token_level_rewards"] = rewards_on_kept(data.batch["token_level_rewards"], mask, kept)
    metrics = correction_metrics(trainer, rollout, mask, correction)
    return data.union(DataProto.from_dict(tensors=columns)) if columns else data, metrics


def loss_mask_of(data: DataProto) -> torch.Tensor:
    """1 on the tokens that train: `response_mask`, less what rollout correction rejected."""
    return data.batch.get("loss_mask", data.batch["response_mask"])


def high_covariance(data: DataProto, policy_loss: PolicyLossConfig, seed: list[int]) -> dict[str, torch.Tensor]:
    """The column `high_covariance` of a mini-batch: the tokens that clip_cov draws, or that kl_cov penalises."""
    mask = loss_mask_of(data)
    covariance = covariances(data.batch["old_log_probs"], data.batch["advantages"], mask)
    if policy_loss.loss_mode == "kl_cov":
        return {"high_covariance": choose_largest(covariance, mask, share=policy_loss.kl_cov_ratio)}
    words = np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) >> np.uint64(1)
    chosen = choose_at_random(
        covariance,
        mask,
        share=policy_loss.clip_cov_ratio,
        low=policy_loss.clip_cov_lb,
        high=policy_loss.clip_cov_ub,
        generator=torch.Generator().manual_seed(int(words[0])),
    )
    return {"high_covariance": chosen}
