"""Validation: sample responses to held-out prompts and score them by rule."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.protocol import DataProto
from paceline.trainer.ppo.phases import make_requests

if TYPE_CHECKING:
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def _mean_at_n(source: np.ndarray, uid: np.ndarray, scores: np.ndarray, name: str, n: int) -> dict[str, float]:
    """Mean over prompts of the mean over a prompt's responses, by data source; a source without scores has none."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row_source, row_uid, score in zip(source, uid, scores, strict=True):
        if not np.isnan(score):
            groups[row_source][row_uid].append(float(score))
    return {
        f"val-core/{row_source}/{name}/mean@{n}": float(np.mean([np.mean(scores) for scores in prompts.values()]))
        for row_source, prompts in groups.items()
    }


def _accuracy(info: dict[str, np.ndarray], num_rows: int) -> np.ndarray:
    """`acc` of each row; NaN where the scorer has no such thing, 0 where grading failed or timed out."""
    accuracy = np.asarray(info.get("acc", np.full(num_rows, np.nan)), dtype=float).copy()
    for flag in ("timeout", "grader_error"):
        accuracy[np.asarray(info.get(flag, np.zeros(num_rows)), dtype=bool)] = 0.0
    return accuracy


def _rows_with_rule(rows: dict[str, Any], trainer: RayPPOTrainer) -> np.ndarray:
    """Places of the rows that a function can score; a reward model never validates."""
    count = len(rows["input_ids"])
    has_rule = getattr(trainer.val_reward_fn, "has_rule", None)
    if has_rule is None:
        return np.arange(count)
    sources = rows.get(trainer.config.data.reward_fn_key, [None] * count)
    truths = rows.get("reward_model", [None] * count)
    return np.array([row for row in range(count) if has_rule(sources[row], truths[row])], dtype=int)


def validate(trainer: RayPPOTrainer, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Metrics `val-core/<data_source>/{reward,acc}/mean@n` over all batches.

    Seeds depend on the place of a prompt alone, so each validation of a run asks the same questions with the same luck.
    Rows that no function scores are skipped and counted in `val-aux/skipped_rows`.
    """
    sampling = trainer.config.actor_rollout_ref.rollout.val_kwargs
    reward_fn_key = trainer.config.data.reward_fn_key
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    skipped = 0
    for place, rows in enumerate(batches):
        scored = _rows_with_rule(rows, trainer)
        skipped += len(rows["input_ids"]) - len(scored)
        if len(scored) == 0:
            continue
        rows = {name: column[scored] for name, column in rows.items()}
        requests, labels = make_requests(
            rows, n=sampling.n, seed=trainer.config.trainer.seed, purpose="validation", step=place
        )
        batch: DataProto = labels.union(trainer.generate(requests, sampling).get())
        result = trainer.val_reward_fn(batch, return_dict=True)
        columns["reward"].append(result["reward_tensor"].sum(dim=-1).numpy())
        columns["acc"].append(_accuracy(result.get("reward_extra_info", {}), len(batch)))
        columns["uid"].append(batch.non_tensor_batch["uid"])
        unnamed = np.array(["unknown"] * len(batch), dtype=object)
        columns["source"].append(batch.non_tensor_batch.get(reward_fn_key, unnamed))
    metrics: dict[str, float] = {}
    if skipped:
        logger.warning("validation skipped %d rows that no function scores", skipped)
        metrics["val-aux/skipped_rows"] = float(skipped)
    if not columns:
        return metrics
    source, uid = np.concatenate(columns["source"]), np.concatenate(columns["uid"])
    for name in ("reward", "acc"):
        metrics |= _mean_at_n(source, uid, np.concatenate(columns[name]), name, sampling.n)
    return metrics
