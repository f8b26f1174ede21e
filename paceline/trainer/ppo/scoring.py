"""Scores of a batch: rules in the reward processes, the reward model on its pool, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.config import PPOConfig
from paceline.config.reward import read_weights
from paceline.protocol import DataProto, DataProtoFuture
from paceline.rewards import add_model_scores, reward_metrics, uses_model
from paceline.schema import MODEL_INPUTS
from paceline.workers.reward_worker import extra_info_columns

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup

GRADED = ["prompts", "responses", "attention_mask", "response_mask"]
"""What a reward function gets, beside every non-tensor column."""


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
        self._has_rule = has_rule

    def issue(
        self, batch: DataProto, reward_wg: RayWorkerGroup, rm_wg: RayWorkerGroup | None, *, validation: bool = False
    ) -> PendingScores:
        """Start scoring. Without `rm_wg` the reward function alone scores."""
        graded = reward_wg.compute_reward(batch.select(batch_keys=GRADED), validation=validation)
        if rm_wg is None:
            return PendingScores(lambda: _rule_scores(graded))
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
        scores, info = _rule_scores(graded)
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
        )

    def metrics(self, batch: DataProto, info: dict[str, np.ndarray]) -> dict[str, float]:
        """Means and counts over all responses; none for a reward function that says nothing besides scores."""
        if "score" not in info:
            return {}
        return reward_metrics(self.sources(batch), info)


def _rule_scores(graded: DataProtoFuture) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    result = graded.get()
    return result.batch["token_level_scores"], extra_info_columns(result)
