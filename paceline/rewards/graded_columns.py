"""What is reported of graded rows: columns of `reward_extra_info`, and metrics over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.errors import RewardError

__all__ = ["UNNAMED", "columns_of", "columns_of_batch", "extra_info_columns", "reward_metrics", "settle_accuracy"]

FLAGS = ("extracted", "timeout", "grader_error", "empty", "has_rule")
"""Columns of every batch, beside `score`."""
_DEFAULTS = {"extracted": True, "has_rule": True}

UNNAMED = "unknown"
"""The source in metrics of rows that have none."""


def columns_of(rows: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    """One array (batch,) per field of the rows: NaN, or None among things that are no numbers, where a row lacks it.

    >>> columns_of([{"acc": 1.0}, {}])
    {'acc': array([ 1., nan])}
    """
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, int | float | np.number | np.bool_ | None) for value in values):
            columns[name] = np.array([math.nan if value is None else value for value in values])
        else:
            columns[name] = np.empty(len(rows), dtype=object)
            columns[name][:] = values
    return columns


def extra_info_columns(rows: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    """The columns of graded rows, with a `score` and all flags."""
    flags = [{flag: bool(row.get(flag, _DEFAULTS.get(flag, False))) for flag in FLAGS} for row in rows]
    info = columns_of([{"score": row["score"], **known, **row} for row, known in zip(rows, flags, strict=True)])
    info["score"] = info["score"].astype(np.float32)
    return info | {flag: info[flag].astype(bool) for flag in FLAGS}


def columns_of_batch(
    rows: Sequence[Mapping[str, object]], sources: Sequence[object], all_may_fail: bool
) -> dict[str, np.ndarray]:
    """The columns of a whole batch, whose rows several reward processes graded.

    Raises a RewardError if grading failed for all of several rows, unless `all_may_fail`: a function that fails on
    everything is broken.
    """
    info = settle_accuracy(sources, columns_of(rows))
    if all_may_fail or not {"grader_error", "has_rule", "empty"} <= set(info):
        return info
    graded = info["has_rule"].astype(bool) & ~info["empty"].astype(bool)
    if graded.sum() > 1 and info["grader_error"].astype(bool)[graded].all():
        raise RewardError(
            f"grading failed for all {graded.sum()} responses of a batch; the first: {info['error'][graded][0]}. "
            "Correct the reward function, or set reward_model.on_error to say what else to do."
        )
    return info


def settle_accuracy(sources: Sequence[object], info: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With `acc` 0 where a response was empty, timed out or could not be graded, in sources that have an accuracy."""
    if "acc" not in info or info["acc"].dtype == object:
        return dict(info)
    accuracy = info["acc"].astype(float)
    measured = {source for source, value in zip(sources, accuracy, strict=True) if not math.isnan(value)}
    has_accuracy = np.array([source in measured for source in sources], dtype=bool)
    nothing = sum(_flag(info, flag, len(sources)) for flag in ("empty", "timeout", "grader_error")) > 0
    silent = has_accuracy & nothing & _flag(info, "has_rule", len(sources))
    return {**info, "acc": np.where(silent, 0.0, accuracy)}


def reward_metrics(sources: Sequence[object], info: Mapping[str, np.ndarray]) -> dict[str, float]:
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
