"""What is told about graded rows: columns of `reward_extra_info`, and metrics over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["extra_info_columns", "reward_metrics"]

FLAGS = ("extracted", "timeout", "grader_error", "empty", "has_rule")
"""Columns of every batch, beside `score`."""
_DEFAULTS = {"extracted": True, "has_rule": True}

UNNAMED = "unknown"
"""The source in metrics of rows that have none."""


def extra_info_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """One array (batch,) per key of the results; a row without the key has NaN, or None where values are no numbers."""
    info: dict[str, np.ndarray] = {"score": np.array([row["score"] for row in rows], dtype=np.float32)}
    for flag in FLAGS:
        info[flag] = np.array([bool(row.get(flag, _DEFAULTS.get(flag, False))) for row in rows], dtype=bool)
    for key in dict.fromkeys(key for row in rows for key in row if key not in info):
        values = [row.get(key) for row in rows]
        if all(isinstance(value, int | float | np.number | None) for value in values):
            info[key] = np.array([math.nan if value is None else value for value in values], dtype=np.float32)
        else:
            info[key] = np.empty(len(rows), dtype=object)
            info[key][:] = values
    if "acc" in info:
        info["acc"][info["empty"] & info["has_rule"]] = 0.0  # silence is wrong, not ungraded
    return info


def reward_metrics(sources: Sequence[Any], info: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means by source, and how many responses could not be graded, apart from those that were wrong.

    Takes the data_source of each row and the columns of `reward_extra_info`, of one reward process or of all together.
    """
    flags = {flag: _flag(info, flag, len(sources)) for flag in FLAGS}
    attempted = flags["has_rule"] & ~flags["empty"] & ~flags["grader_error"]
    failed = attempted & ~flags["extracted"]
    metrics = {
        "reward/extraction_failed_rate": float(failed.sum() / max(attempted.sum(), 1)),
        "reward/extraction_failed": float(failed.sum()),
        "reward/grader_timeouts": float(flags["timeout"].sum()),
        "reward/grader_errors": float(flags["grader_error"].sum()),
        "reward/empty_responses": float(flags["empty"].sum()),
    }
    if "retries" in info:
        metrics["reward/retries"] = float(np.nansum(info["retries"]))
    if "overlong" in info:
        metrics["reward/overlong_rate"] = float(np.mean(info["overlong"]))
        metrics["reward/overlong_penalty"] = float(np.mean(info["overlong_penalty"]))
    # A row that waits for the model's score has none yet, which is not a score of 0.
    scored = np.ones(len(sources), dtype=bool) if "model_score" in info else flags["has_rule"]
    for source in dict.fromkeys(sources):
        rows = np.array([other == source for other in sources])
        name = UNNAMED if source is None else source
        if (rows & scored).any():
            metrics[f"reward/{name}/score"] = float(np.mean(info["score"][rows & scored]))
        for column in ("acc", "model_score"):
            if column in info and info[column].dtype != object and not np.isnan(info[column][rows]).all():
                metrics[f"reward/{name}/{column}"] = float(np.nanmean(info[column][rows]))
    return metrics


def _flag(info: Mapping[str, np.ndarray], name: str, num_rows: int) -> np.ndarray:
    if name not in info:
        return np.full(num_rows, _DEFAULTS.get(name, False))
    return np.asarray(info[name]).astype(bool)
