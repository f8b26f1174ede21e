"""The kinds of training on given texts, as data: each has its keys, its rows, its worker and its validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.data.text_rows import Dialogues, Pairs, TextRows
from paceline.workers.supervised_workers import DialogueWorker, PairScoreWorker, PreferenceWorker, SupervisedWorker

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Objective:
    """One kind."""

    rows: type[TextRows[Any]]
    worker: type[SupervisedWorker[Any]]
    summarise: Callable[[SupervisedConfig, dict[str, Tensor]], dict[str, float]]
    """From what `worker.measure` gave, all rows of a validation, to its metrics."""
    unit: str
    """What a row is called."""


def mean_loss(_: SupervisedConfig, measured: dict[str, Tensor]) -> dict[str, float]:
    """The loss as training has it: over all trained tokens, or all pairs."""
    return {"val/loss": float(measured["loss"].double().sum() / measured["weight"].double().sum().clamp(min=1))}


def pair_metrics(cfg: SupervisedConfig, measured: dict[str, Tensor]) -> dict[str, float]:
    """The loss, in how many pairs the chosen one is ahead, and by how much."""
    margin = (measured["chosen"] - measured["rejected"]).double()
    return mean_loss(cfg, measured) | {
        "val/accuracy": float((margin > 0).double().mean()),
        "val/margin": float(margin.mean()),
    }


def score_metrics(cfg: SupervisedConfig, measured: dict[str, Tensor]) -> dict[str, float]:
    """Those of pairs, and whether the probabilities that differences of scores stand for are what happens."""
    scores = torch.cat([measured["chosen"], measured["rejected"]]).double()
    return pair_metrics(cfg, measured) | {
        "val/calibration_error": calibration_error(measured["chosen"] - measured["rejected"]),
        "val/score/mean": float(scores.mean()),
        "val/score/std": float(scores.std(unbiased=False)),
    }


def calibration_error(margin: Tensor) -> float:
    """Expected calibration error of a reward model: by how much its certainty misses how often it is right.

    A pair whose scores differ by m is ordered right with probability sigmoid(|m|), says the model. Pairs are put into
    bins of equal width by that, and in each its mean is compared with the share that is right, weighted by pairs.

    >>> calibration_error(torch.tensor([100.0, 100.0, 100.0, -100.0]))
    0.25
    """
    certainty, right = margin.double().abs().sigmoid(), (margin > 0).double()
    bins = ((certainty - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add(0, bins, certainty - right)
    return float(gaps.abs().sum() / max(len(margin), 1))


OBJECTIVES: dict[type[SupervisedConfig], Objective] = {
    SFTConfig: Objective(Dialogues, DialogueWorker, mean_loss, "conversations"),
    RewardModelTrainingConfig: Objective(Pairs, PairScoreWorker, score_metrics, "pairs"),
    DPOConfig: Objective(Pairs, PreferenceWorker, pair_metrics, "pairs"),
}
"""By the configuration of a run."""
