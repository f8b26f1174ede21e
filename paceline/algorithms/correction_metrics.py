"""The metrics `rollout_corr/*`: how far rollout and trainer are apart, and what a correction made of it.

Means are over valid tokens, or over responses with at least one; padding enters none. A batch without a token has none.
"""

from __future__ import annotations

import torch

from paceline.algorithms.masking import masked_mean
from paceline.algorithms.rollout_correction import (
    MAX_LOG_RATIO,
    RolloutCorrection,
    bounded,
    kept_tokens,
    log_ratio_of,
    mean_weight,
    raw_weights,
    statistic,
)

PREFIX = "rollout_corr/"


@torch.no_grad()
def correction_metrics(
    trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrection
) -> dict[str, float]:
    """All metrics of a batch, from the log-probs (batch, response) under trainer and rollout."""
    if not mask.any():
        return {}
    log_ratio = log_ratio_of(trainer, rollout, mask)
    metrics = mismatch(trainer, rollout, mask)
    if correction.level is not None:
        metrics |= weight_metrics(log_ratio, mask, correction)
    if correction.rejections:
        metrics |= rejection_metrics(log_ratio, mask, correction)
    return {PREFIX + name: float(value) for name, value in metrics.items()}


def mismatch(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Perplexities, KL and chi-squared divergence of the rollout from the trainer; |log r| counts as 20 at most."""
    log_ratio = log_ratio_of(trainer, rollout, mask)
    c = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_row = mask.bool().any(dim=-1)
    of_trainer, of_rollout = (-masked_mean(column, mask, dim=-1)[is_row] for column in (trainer, rollout))
    difference = of_trainer - of_rollout
    whole = log_ratio.sum(dim=-1)[is_row].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "training_ppl": of_trainer.exp().mean(),
        "training_log_ppl": of_trainer.mean(),
        "rollout_ppl": of_rollout.exp().mean(),
        "rollout_log_ppl": of_rollout.mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(torch.expm1(c) - c, mask),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean((2 * c).exp(), mask) - 1,
        "chi2_seq": (2 * whole).exp().mean() - 1,
    }


def weight_metrics(
    log_ratio: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrection
) -> dict[str, torch.Tensor]:
    """Of the weights before they are divided by their mean; fractions are of r before it is bounded."""
    assert correction.level is not None
    raw = raw_weights(log_ratio, mask, correction.level)
    low = 1 / correction.high if correction.low is None else correction.low
    weights = bounded(raw, correction.low, correction.high)
    extremes = raw if correction.level == "sequence" else weights
    mean = masked_mean(weights, mask)
    metrics = {
        "mean": mean,
        "max": extremes[mask.bool()].max(),
        "min": extremes[mask.bool()].min(),
        "std": weights[mask.bool()].std(correction=0),
        "ratio_fraction_high": masked_mean((raw > correction.high).float(), mask),
        "ratio_fraction_low": masked_mean((raw < low).float(), mask),
        "eff_sample_size": 1 / masked_mean((weights / mean.clamp(min=1e-8)).square(), mask).clamp(min=1e-8),
        **_of_responses(weights, raw, mask, low, correction.high, centre=1.0),
    }
    if correction.low is not None:
        metrics["oob_ratio"] = masked_mean(((raw < low) | (raw > correction.high)).float(), mask)
    if correction.normalise:
        metrics["batch_norm_factor"] = mean_weight(weights, mask, correction.level)
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def rejection_metrics(
    log_ratio: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrection
) -> dict[str, torch.Tensor]:
    """Of each criterion's statistic, and the shares of tokens and of whole responses that are rejected."""
    metrics: dict[str, torch.Tensor] = {}
    for rejection in correction.rejections:
        found = statistic(log_ratio, mask, rejection.criterion)
        valid = found[mask.bool()]
        of_criterion = {
            "mean": valid.mean(),
            "max": valid.max(),
            "min": valid.min(),
            "std": valid.std(correction=0),
            "fraction_high": (valid > rejection.high).float().mean(),
            "fraction_low": (valid < rejection.low).float().mean(),
            **_of_responses(found, found, mask, rejection.low, rejection.high, centre=0.0),
            **rejected_shares(mask, kept_tokens(log_ratio, mask, (rejection,))),
        }
        metrics |= {f"rollout_rs_{rejection.criterion}_{name}": value for name, value in of_criterion.items()}
    kept = kept_tokens(log_ratio, mask, correction.rejections)
    metrics |= {f"rollout_rs_{name}": value for name, value in rejected_shares(mask, kept).items()}
    metrics["rollout_rs_all_masked"] = (~kept.bool().any()).float()
    return metrics


def rejected_shares(mask: torch.Tensor, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens that are rejected, and responses of which nothing is kept."""
    return {
        "masked_fraction": 1 - masked_mean(kept.float(), mask),
        "seq_masked_fraction": 1 - masked_mean(kept.bool().any(dim=-1).float(), mask.bool().any(dim=-1)),
    }


def _of_responses(
    x: torch.Tensor, raw: torch.Tensor, mask: torch.Tensor, low: float, high: float, *, centre: float
) -> dict[str, torch.Tensor]:
    """The same of the means over each response; fractions are of `raw`."""
    is_row = mask.bool().any(dim=-1)
    means, raw_means = (masked_mean(column, mask, dim=-1)[is_row] for column in (x, raw))
    return {
        "seq_mean": means.mean(),
        "seq_std": means.std(correction=0),
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": (means - centre).abs().max(),
        "seq_fraction_high": (raw_means > high).float().mean(),
        "seq_fraction_low": (raw_means < low).float().mean(),
    }
