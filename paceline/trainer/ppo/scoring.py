"""Scores of a batch: rules in the reward processes, the reward model on its pool, at the same time.

`paceline.rewards` says what the scores of a row are and how they are added up; this file issues the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.config import PPOConfig
from paceline.config.reward import read_weights
from paceline.errors import RewardError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.rewards import UNNAMED, add_model_scores, columns_of, columns_of_batch, reward_metrics, rows_of_model
from paceline.schema import MODEL_INPUTS
from paceline.workers.agent_rows import CHAT
from paceline.workers.reward_worker import EXTRA_INFO

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup

GRADED = ["prompts", "responses", "attention_mask", "response_mask"]
"""What a reward function gets, beside every non-tensor column."""


def check_scorable(
    reward_fn: object, dataset: Any, source_key: str, *, has_model: bool, validation: bool = False
) -> None:
    """Raise now, not in the middle of a run, for an unknown data source or a ground truth that can't be used.

    A RewardManager that was made without weights is told of the model. A reward function or a dataset of the user's own
    may have nothing to ask.
    """
    if not hasattr(reward_fn, "check") or not hasattr(dataset, "column"):
        return
    sources = dataset.column(source_key)
    labels = dataset.reward_labels() if hasattr(dataset, "reward_labels") else dataset.column("reward_model")
    if has_model and hasattr(reward_fn, "expect_model"):
        reward_fn.expect_model()
    reward_fn.check(sources, labels, has_model=has_model, validation=validation)
    if hasattr(reward_fn, "check_truths") and hasattr(dataset, "ground_truth"):
        reward_fn.check_truths(sources, labels, dataset.ground_truth, dataset.place)


def ask_rules(batch: DataProto, reward_wg: RayWorkerGroup, *, validation: bool = False) -> DataProtoFuture:
    """Have the reward function grade responses."""
    return reward_wg.compute_reward(batch.select(batch_keys=GRADED), validation=validation)


class Scoring:
    """Who scores a response in this run, and how their scores are put together."""

    def __init__(self, config: PPOConfig, has_rule: Callable[[object, object], bool] | None) -> None:
        self.source_key = config.data.reward_fn_key
        self.weights = read_weights(config.reward_model.weights)
        self.all_may_fail = config.reward_model.on_error is not None
        self.stops = config.trainer.on_nonfinite == "stop"
        self._has_rule = has_rule

    def issue(
        self,
        batch: DataProto,
        reward_wg: RayWorkerGroup,
        rm_wg: RayWorkerGroup | None,
        *,
        validation: bool = False,
        graded: DataProtoFuture | None = None,
    ) -> DataProtoFuture:
        """Start scoring. Without `rm_wg` the reward function alone scores; `graded` if it was asked before.

        The future has `token_level_scores`, the graders' fields of each response in column `EXTRA_INFO`, and metrics.
        """
        graded = graded or ask_rules(batch, reward_wg, validation=validation)
        if rm_wg is None:
            return graded.then(lambda result: self._answer(batch, *self._rule_scores(batch, result)))
        by_model = None
        sources = self._named_sources(batch)
        rows = np.flatnonzero(rows_of_model(sources, self.rows_with_rule(batch), self.weights))
        if len(rows):
            chats = [name for name in ("raw_prompt", CHAT) if name in batch.non_tensor_batch]
            by_model = rm_wg.compute_rm_score(batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=chats)[rows])
        return graded.then(lambda result: self._answer(batch, *self._with_model(batch, result, by_model, rows)))

    def _answer(self, batch: DataProto, scores: torch.Tensor, info: dict[str, np.ndarray]) -> DataProto:
        rows = np.empty(len(batch), dtype=object)
        rows[:] = [{name: column[row] for name, column in info.items()} for row in range(len(batch))]
        return DataProto.from_dict(
            tensors={"token_level_scores": scores},
            non_tensors={EXTRA_INFO: rows},
            meta_info={"metrics": grader_metrics(sources_of(batch, self.source_key), info)},
        )

    def _named_sources(self, batch: DataProto) -> list[object]:
        return list(batch.non_tensor_batch.get(self.source_key, [None] * len(batch)))

    def rows_with_rule(self, batch: DataProto) -> np.ndarray:
        """Which rows (batch,) the reward function can score."""
        if self._has_rule is None:
            return np.ones(len(batch), dtype=bool)
        truths = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
        rows = zip(self._named_sources(batch), truths, strict=True)
        return np.array([self._has_rule(*row) for row in rows], dtype=bool)

    def _with_model(
        self, batch: DataProto, graded: DataProto, by_model: DataProtoFuture | None, rows: np.ndarray
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

    def _rule_scores(self, batch: DataProto, graded: DataProto) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        rows = list(graded.non_tensor_batch[EXTRA_INFO])
        info = columns_of_batch(rows, self._named_sources(batch), all_may_fail=self.all_may_fail)
        return graded.batch["token_level_scores"], info


def sources_of(batch: DataProto, source_key: str) -> list[object]:
    """The data source of each row, as metrics call it."""
    sources = batch.non_tensor_batch.get(source_key, [None] * len(batch))
    return [UNNAMED if source is None else source for source in sources]


def grader_fields(batch: DataProto) -> dict[str, np.ndarray]:
    """What graders said of each response besides its score: a column (batch,) for each field."""
    return columns_of(list(batch.non_tensor_batch[EXTRA_INFO]))


def reward_components(batch: DataProto, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The parts (batch,) of the scores by these names, which graders gave beside the score; a RewardError if one lacks.

    A response that is empty, timed out or could not be graded scores 0, and so does each part of it.
    """
    fields = grader_fields(batch)
    flags = [fields[flag].astype(bool) for flag in ("empty", "timeout", "grader_error") if flag in fields]
    ungraded = np.any(flags, axis=0) if flags else np.zeros(len(batch), dtype=bool)
    components = {}
    for name in names:
        column = fields.get(name, np.full(len(batch), None))
        values = np.array(
            [value if isinstance(value, int | float | np.number | np.bool_) else np.nan for value in column]
        )
        values = np.where(ungraded & ~np.isfinite(values), 0.0, values).astype(np.float64)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            given = batch.non_tensor_batch[EXTRA_INFO][row]
            found = f"it gave {given[name]!r}" if given.get(name) is not None else f"it gave {', '.join(given)}"
            raise RewardError(
                f"algorithm.gdpo_reward_keys has {name!r}, and the reward of response {row} has no such number: "
                f"{found}. Let the reward function return a dict with {name!r} for every response."
            )
        components[name] = torch.from_numpy(values).float()
    return components


def grader_metrics(sources: list[object], fields: dict[str, np.ndarray]) -> dict[str, float]:
    """Means and counts over all responses; none for a reward function that says nothing besides scores."""
    return reward_metrics(sources, fields) if "score" in fields else {}


def baselines_of(scored: DataProto, n: int) -> DataProto:
    """The score of each prompt's greedy response, for each of its n responses.

    The metrics say how many could not be graded, in time or at all: their prompts' baseline is 0.
    """
    fields = grader_fields(scored)
    failures = {"grader_error": "reward/baseline_grader_errors", "timeout": "reward/baseline_grader_timeouts"}
    metrics = {name: float(fields[flag].sum()) for flag, name in failures.items() if flag in fields}
    totals = scored.batch["token_level_scores"].sum(dim=-1)
    baselines = {"reward_baselines": totals.repeat_interleave(n)}
    return DataProto.from_dict(tensors=baselines, meta_info={"metrics": metrics})
