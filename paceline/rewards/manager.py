"""From responses to rewards: decode, grade by source, put each score on the last response token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.config import PPOConfig
from paceline.config.reward import read_weights
from paceline.errors import DataError
from paceline.rewards.by_source import code_scorers, registered_scorers
from paceline.rewards.combine import Overlong, Weights, add_model_scores, at_last_token
from paceline.rewards.coverage import Coverage, ground_truth, wants_model
from paceline.rewards.custom import load_custom_reward
from paceline.rewards.graded_columns import extra_info_columns, reward_metrics, settle_accuracy
from paceline.rewards.grading import OnError, grade_all
from paceline.rewards.scorer import RewardFunction, Row, RowScorer, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.protocol import DataProto

__all__ = ["RewardManager", "make_reward_manager"]

logger = logging.getLogger(__name__)

MOST_SHOWN = 10
"""Rows with a bad ground truth that a message shows."""


class RewardManager:
    """Calls the scorer of each row's source, or one function of the user's for all rows.

    It can be pickled: scorers that were registered here, and the file of the user's function, go with it.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: how many examples of each source every call writes to the log, or to stderr where logging is not
            set up; 0 for training, 1 for validation.
        compute_score: grades every row instead of the scorers by source, in one of the forms of a `RewardFunction`:
            `fn(data_source, solution_str, ground_truth, extra_info) -> float` or a dict with `score`; or for a batch.
        reward_fn_key: the column that names the source.
        on_error: what happens when grading fails, as `reward_model.on_error`.
        max_retries: further attempts with on_error="retry".
        timeout_seconds: of one call of a function or scorer of the user's, as `reward_model.timeout_seconds`.
        weights: of rule and model, as `reward_model.weights`; give them, or {}, if a reward model scores too.
        scorers: by source, instead of the registered ones.
        overlong: the penalty of long responses.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        *,
        on_error: OnError | None = None,
        max_retries: int = 3,
        timeout_seconds: float | None = None,
        weights: Weights | None = None,
        scorers: Mapping[str, Scorer] | None = None,
        overlong: Overlong | None = None,
    ) -> None:
        if compute_score is not None and not isinstance(compute_score, RewardFunction):
            compute_score = RewardFunction(compute_score)
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RewardFunction | None = compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        self.max_retries = max_retries
        self.timeout_seconds = timeout_seconds
        self.weights = None if weights is None else read_weights(weights)
        self.scorers = dict(scorers or {})
        self.overlong = overlong
        self.teacher_scores = False

    def __getstate__(self) -> dict[str, object]:
        """Scorers that were registered in this process are unknown in another: all go with the manager."""
        return {**vars(self), "scorers": self._known_scorers()}

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Grade the responses of a batch; the prompt is not graded.

        Reads `prompts` (batch, prompt), `responses` (batch, response), `attention_mask` (batch, prompt + response)
        and the non-tensor `data_source`, `reward_model["ground_truth"]`, `extra_info`. If the batch has a reward
        model's `rm_scores` (batch, response), they are added as the weights say; if not, rows without a rule score 0
        here, and `has_rule` says so.

        Returns:
            Float rewards (batch, response): the score at the last response token, 0 elsewhere. With `return_dict`:
            `reward_tensor`; `reward_extra_info`, arrays (batch,) of `score`, `extracted`, `timeout`, `grader_error`,
            `empty`, `has_rule` and what scorers returned besides; `metrics`, their means and counts under `reward/`.
        """
        prompt_length = data.batch["prompts"].shape[-1]
        mask = data.batch["attention_mask"][:, prompt_length:].bool().cpu()
        rows = self._rows(data, mask)
        sources = [row.data_source for row in rows]
        info = self._grade(rows, _cells(data, "reward_model"), mask, has_scores="rm_scores" in data.batch)
        rewards = at_last_token(torch.from_numpy(info["score"]), mask)
        if "rm_scores" in data.batch:
            scores = data.batch["rm_scores"].cpu()
            rewards, info = add_model_scores(
                rewards, info, scores, mask=mask, sources=sources, weights=self.weights or {}
            )
        self._show_examples(data, rows, info)
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": info, "metrics": reward_metrics(sources, info)}

    def has_rule(self, data_source: object, reward_model: object) -> bool:
        """Whether a row is graded here: by the user's function, or by a known source that has a ground truth.

        Where there is a reward model, rows with `style: "model"` are its own.
        """
        return self._has_rule(data_source, reward_model, self.weights is not None)

    def _has_rule(self, data_source: object, reward_model: object, has_model: bool) -> bool:
        if self.compute_score is not None:
            return True
        if has_model and wants_model(reward_model):
            return False
        return self._scorer(data_source) is not None and ground_truth(reward_model) is not None

    def expect_model(self) -> None:
        """Leave rows without a rule, and those with `style: "model"`, to a reward model from now on."""
        if self.weights is None:
            self.weights = {}

    def expect_teacher(self) -> None:
        """Rows without a rule score 0 from now on: scores are a measure, and a teacher is what trains."""
        self.teacher_scores = True

    def check(
        self,
        data_sources: Sequence[object],
        reward_models: Sequence[object],
        has_model: bool = False,
        validation: bool = False,
    ) -> None:
        """Raise now, not in the middle of a run, if some rows have no score, or a model or a scorer can't do its part.

        With `has_model`, as if a reward model were expected. Data for validation need not use it.
        """
        has_rule = [
            self._has_rule(*row, has_model or self.weights is not None)
            for row in zip(data_sources, reward_models, strict=True)
        ]
        coverage = self._coverage(data_sources, reward_models, has_rule, has_model)
        coverage.refuse_unscored()
        if has_model and not validation:
            coverage.refuse_idle_model()
        if self.compute_score is None:
            graded = {source for source, rule in zip(data_sources, has_rule, strict=True) if rule}
            checks = [scorer.check for source in graded if (scorer := self._scorer(source)) and scorer.check]
            for check in dict.fromkeys(checks):
                check()

    def check_truths(
        self,
        data_sources: Sequence[object],
        reward_models: Sequence[object],
        truth_of: Callable[[int], object],
        place_of: Callable[[int], str] = "row {}".format,
    ) -> None:
        """Raise a DataError that lists rows whose ground truth their scorer could not use.

        `truth_of(row)` is asked only where a scorer has such a check; `place_of(row)` names the row in the message.
        """
        problems = []
        for row, (source, reward_model) in enumerate(zip(data_sources, reward_models, strict=True)):
            scorer = None if self.compute_score is not None else self._scorer(source)
            if scorer is not None and scorer.check_truth is not None and self.has_rule(source, reward_model):
                try:
                    scorer.check_truth(truth_of(row))
                except DataError as error:
                    problems.append(f"{place_of(row)} ({self.reward_fn_key}={source!r}): {error}")
        if problems:
            shown = "\n".join(f"  {number}. {text}" for number, text in enumerate(problems[:MOST_SHOWN], 1))
            more = f"\n  and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
            raise DataError(
                f"{len(problems)} of {len(data_sources)} rows have a ground truth that can't be used:\n{shown}{more}"
            )

    def _coverage(
        self, sources: Sequence[object], reward_models: Sequence[object], has_rule: Sequence[bool], has_model: bool
    ) -> Coverage:
        known = self._known_scorers()
        return Coverage(sources, reward_models, has_rule, known, self.weights or {}, has_model, self.reward_fn_key)

    def _scorer(self, source: object) -> Scorer | None:
        if not isinstance(source, str):
            return None
        return self.scorers.get(source) or registered_scorers().get(source)

    def _known_scorers(self) -> dict[str, Scorer]:
        return {**registered_scorers(), **self.scorers}

    def _rows(self, data: DataProto, mask: torch.Tensor) -> list[Row]:
        responses = data.batch["responses"].cpu()
        tokens = [row[valid].tolist() for row, valid in zip(responses, mask, strict=True)]
        columns = (
            _cells(data, self.reward_fn_key),
            self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            [ground_truth(cell) for cell in _cells(data, "reward_model")],
            _cells(data, "extra_info"),
        )
        return [Row(*values) for values in zip(*columns, strict=True)]

    def _grade(
        self, rows: list[Row], reward_models: list[object], mask: torch.Tensor, has_scores: bool
    ) -> dict[str, np.ndarray]:
        """The columns of `reward_extra_info`, before a model's scores."""
        has_model = self.weights is not None or has_scores
        sources = [row.data_source for row in rows]
        has_rule = [self.has_rule(*row) for row in zip(sources, reward_models, strict=True)]
        if not self.teacher_scores:
            self._coverage(sources, reward_models, has_rule, has_model).refuse_unscored()
        empty = (~mask.any(dim=-1)).tolist()
        graded = {place: row for place, row in enumerate(rows) if has_rule[place] and not empty[place]}
        results = grade_all(self._groups(graded), self.on_error, self.max_retries, self.timeout_seconds)
        ungraded = {"score": 0.0, "extracted": False}
        info = extra_info_columns(
            [
                {**results.get(place, ungraded), "has_rule": has_rule[place], "empty": empty[place]}
                for place in range(len(rows))
            ]
        )
        info = settle_accuracy(sources, info)
        return info if self.overlong is None else self.overlong.add_to(info, mask.sum(dim=-1))

    def _groups(self, rows: dict[int, Row]) -> list[tuple[RowScorer, dict[int, Row]]]:
        """Rows with who grades them: the user's function all, scorers those of their source."""
        if self.compute_score is not None:
            return [(self.compute_score, rows)] if rows else []
        by_source: dict[object, dict[int, Row]] = {}
        for place, row in rows.items():
            by_source.setdefault(row.data_source, {})[place] = row
        return [(scorer, group) for source, group in by_source.items() if (scorer := self._scorer(source))]

    def _show_examples(self, data: DataProto, rows: list[Row], info: dict[str, np.ndarray]) -> None:
        shown: Counter[object] = Counter()
        prompt_length = data.batch["prompts"].shape[-1]
        for place, row in enumerate(rows):
            if shown[row.data_source] >= self.num_examine:
                continue
            shown[row.data_source] += 1
            valid = data.batch["attention_mask"][place, :prompt_length].bool()
            prompt = self.tokenizer.decode(data.batch["prompts"][place][valid].tolist(), skip_special_tokens=True)
            by_model = not info["has_rule"][place] and "model_score" not in info
            score = "the reward model's" if by_model else f"{info['score'][place]:g}"
            _show(
                "Example of %s\n[prompt] %s\n[response] %s\n[ground truth] %s\n[score] %s",
                row.data_source, prompt, row.solution_str, row.ground_truth, score,
            )  # fmt: skip


def _show(message: str, *values: object) -> None:
    """Log an example; on stderr where nobody has set logging up, since it was asked for."""
    if logger.hasHandlers() or logging.lastResort is None:
        logger.info(message, *values)
    else:
        logging.lastResort.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, values, None))


def _cells(data: DataProto, key: str) -> list[object]:
    """A non-tensor column as a list; Nones if the batch has none."""
    column = data.non_tensor_batch.get(key)
    return [None] * len(data) if column is None else list(column)


def make_reward_manager(
    cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int, *, validation: bool = False
) -> RewardManager:
    """Rules by data_source, or the function that custom_reward_function names, with all that reward_model sets."""
    custom, rewards = cfg.custom_reward_function, cfg.reward_model
    has_model = rewards.enable and (rewards.validate or not validation)
    return RewardManager(
        tokenizer,
        num_examine,
        compute_score=load_custom_reward(custom.path, custom.name, custom.reward_kwargs) if custom.path else None,
        reward_fn_key=cfg.data.reward_fn_key,
        # Each process sees only its share of a batch: whether all of it failed is for the trainer to say.
        on_error=rewards.on_error or "zero_and_count",
        max_retries=rewards.max_retries,
        timeout_seconds=rewards.timeout_seconds,
        weights=rewards.weights if has_model else None,
        scorers=code_scorers(rewards.sandbox),
        overlong=_overlong(cfg),
    )


def _overlong(cfg: PPOConfig) -> Overlong | None:
    buffer = cfg.reward_model.reward_kwargs.overlong_buffer_cfg
    if not buffer.enable:
        return None
    max_len = cfg.reward_model.reward_kwargs.max_resp_len or cfg.data.max_response_length
    return Overlong(max_len, buffer.len, buffer.penalty_factor, buffer.log)
