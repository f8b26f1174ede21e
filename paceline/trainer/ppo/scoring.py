"""Scores of a batch: rules in the reward processes, the reward model on its pool, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.config import PPOConfig
from paceline.config.reward import read_weights
from paceline.errors import RewardError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.rewards import add_model_scores, columns_of, reward_metrics, settle_accuracy, uses_model
from paceline.schema import MODEL_INPUTS
from paceline.workers.reward_worker import EXTRA_INFO

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup

GRADED = ["prompts", "responses", "attention_mask", "response_mask"]
"""What a reward function gets, beside every non-tensor column."""


def check_scorable(reward_fn: Any, dataset: Any, source_key: str, *, has_model: bool, validation: bool = False) -> None:
    """Raise now, not in the middle of a run, for an unknown data source or a ground truth that can't be used.

    A reward function or a dataset of the user's own may have nothing to ask.
    """
    if not hasattr(reward_fn, "check") or not hasattr(dataset, "column"):
        return
    sources = dataset.column(source_key)
    labels = dataset.reward_labels() if hasattr(dataset, "reward_labels") else dataset.column("reward_model")
    reward_fn.check(sources, labels, has_model=has_model, validation=validation)
    if hasattr(reward_fn, "check_truths") and hasattr(dataset, "ground_truth"):
        reward_fn.check_truths(sources, labels, dataset.ground_truth, dataset.place)


class PendingScores:
    """Scores that are being computed. `get` gives `token_level_scores`; then `info` has the fields of each response."""

    def __init__(self, collect: Callable[[], tuple[torch.Tensor, dict[str, np.ndarray]]]) -> None:
        self._collect = collect
        self.info: dict[str, np.ndarray] = {}

    def get(self) -> DataProto:
        """Wait for all scores."""
        scores, self.info = self._collect()
        return DataProto.from_dict(tensors={"token_level_scores": scores})


class Scoring:
    """Who scores a response in this run, and how their scores are put together."""

    def __init__(self, config: PPOConfig, has_rule: Callable[[Any, Any], bool] | None) -> None:
        self.source_key = config.data.reward_fn_key
        self.weights = read_weights(config.reward_model.weights)
        self.on_error = config.reward_model.on_error
        self.stops = config.trainer.on_nonfinite == "stop"
        self._has_rule = has_rule

    def issue(
        self, batch: DataProto, reward_wg: RayWorkerGroup, rm_wg: RayWorkerGroup | None, *, validation: bool = False
    ) -> PendingScores:
        """Start scoring. Without `rm_wg` the reward function alone scores."""
        graded = reward_wg.compute_reward(batch.select(batch_keys=GRADED), validation=validation)
        if rm_wg is None:
            return PendingScores(lambda: self._rule_scores(batch, graded))
        by_model = None
        rows = np.flatnonzero(self._rows_of_model(batch))
        if len(rows):
            chats = [name for name in ("raw_prompt",) if name in batch.non_tensor_batch]
            by_model = rm_wg.compute_rm_score(batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=chats)[rows])
        return PendingScores(lambda: self._with_model(batch, graded, by_model, rows))

    def sources(self, batch: DataProto) -> list[Any]:
        """The data source of each row, as metrics call it."""
        return ["unknown" if source is None else source for source in self._named_sources(batch)]

    def _named_sources(self, batch: DataProto) -> list[Any]:
        return list(batch.non_tensor_batch.get(self.source_key, [None] * len(batch)))

    def rows_with_rule(self, batch: DataProto) -> np.ndarray:
        """Which rows (batch,) the reward function can score."""
        if self._has_rule is None:
            return np.ones(len(batch), dtype=bool)
        truths = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
        rows = zip(self._named_sources(batch), truths, strict=True)
        return np.array([self._has_rule(*row) for row in rows], dtype=bool)

    def _rows_of_model(self, batch: DataProto) -> np.ndarray:
        rows = zip(self._named_sources(batch), self.rows_with_rule(batch), strict=True)
        return np.array([uses_model(source, has_rule, self.weights) for source, has_rule in rows], dtype=bool)

    def _with_model(
        self, batch: DataProto, graded: DataProtoFuture, by_model: DataProtoFuture | None, rows: np.ndarray
    ) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        scores, info = self._rule_scores(batch, graded)
        rm_scores = torch.zeros_like(scores)
        if by_model is not None:
            rm_scores[rows] = by_model.get().batch["rm_scores"]
        return add_model_scores(
            scores,
            info | {"has_rule": self.rows_with_rule(batch)},
            rm_scores,
            mask=batch.batch["response_mask"],
            sources=self._named_sources(batch),
            weights=self.weights,
            require_finite=self.stops,  # else the step is left out, as for other numbers that are not finite
        )

    def _rule_scores(self, batch: DataProto, graded: DataProtoFuture) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        result = graded.get()
        info = settle_accuracy(self._named_sources(batch), columns_of(result.non_tensor_batch[EXTRA_INFO]))
        if self.on_error is None:
            _refuse_if_all_failed(info)
        return result.batch["token_level_scores"], info

    def metrics(self, sources: list[Any], info: dict[str, np.ndarray]) -> dict[str, float]:
        """Means and counts over all responses; none for a reward function that says nothing besides scores."""
        return reward_metrics(sources, info) if "score" in info else {}


def baseline_metrics(info: dict[str, np.ndarray]) -> dict[str, float]:
    """How many of the greedy responses could not be graded, in time or at all: their prompts' baseline is 0."""
    failures = {"grader_errors": "grader_error", "grader_timeouts": "timeout"}
    return {f"reward/baseline_{name}": float(info[flag].sum()) for name, flag in failures.items() if flag in info}


def _refuse_if_all_failed(info: dict[str, np.ndarray]) -> None:
    """Where nobody said what to do about failures: a function that fails on everything is broken."""
    if not {"grader_error", "has_rule", "empty"} <= set(info):
        return
    graded = info["has_rule"].astype(bool) & ~info["empty"].astype(bool)
    if graded.sum() > 1 and info["grader_error"].astype(bool)[graded].all():
        raise RewardError(
            f"grading failed for all {graded.sum()} responses of a batch; the first: {info['error'][graded][0]}. Mend "
            "the reward function, or set reward_model.on_error to say what else to do."
        )
