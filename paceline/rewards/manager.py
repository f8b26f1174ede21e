"""From responses to rewards: decode, grade by source, put each score on the last response token."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.errors import DataError, RewardError, UnknownDataSourceError
from paceline.rewards.custom import CUSTOM_KEYWORDS
from paceline.rewards.registry import check_keywords, get_scorer, known_sources

if TYPE_CHECKING:
    from paceline.protocol import DataProto

__all__ = ["RewardManager"]

logger = logging.getLogger(__name__)

ScoreResult = float | dict[str, Any] | Exception

FLAGS = ("extracted", "timeout", "grader_error", "empty")
"""Columns of `reward_extra_info` that every batch has, beside `score`."""


class RewardManager:
    """Calls the scorer of each row's source, or one function of the user's for all rows.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: how many examples of each source every call writes to the log; 0 for training, 1 for validation.
        compute_score: grades every row instead of the scorers by source:
            `fn(data_source, solution_str, ground_truth, extra_info) -> float` or a dict with `score`.
        reward_fn_key: the column that names the source.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., float | dict[str, Any]] | None = None,
        reward_fn_key: str = "data_source",
    ) -> None:
        if compute_score is not None:
            check_keywords(compute_score, CUSTOM_KEYWORDS, "compute_score")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Grade the responses of a batch; the prompt is not graded.

        Reads `prompts` (batch, prompt), `responses` (batch, response), `attention_mask` (batch, prompt + response)
        and the non-tensor `data_source`, `reward_model["ground_truth"]`, `extra_info`. A batch that has a reward
        model's `rm_scores` (batch, response) gets those back.

        Returns:
            Float rewards (batch, response): the score at the last response token, 0 elsewhere. With `return_dict`:
            `reward_tensor`; `reward_extra_info`, arrays (batch,) of `score`, `extracted`, `timeout`, `grader_error`,
            `empty` and what scorers returned besides; `metrics`, their means and counts under `reward/`.
        """
        if "rm_scores" in data.batch:
            rewards = data.batch["rm_scores"]
            return {"reward_tensor": rewards, "reward_extra_info": {}, "metrics": {}} if return_dict else rewards

        responses = data.batch["responses"]
        prompt_length = data.batch["prompts"].shape[-1]
        mask = data.batch["attention_mask"][:, prompt_length:].bool()
        texts = self._decode(responses, mask)
        sources = self._sources(data)
        empty = ~mask.any(dim=-1)
        graded = [row for row in range(len(texts)) if not empty[row]]
        results = self._grade(data, sources, texts, graded)

        info = _extra_info(results, len(texts))
        positions = torch.arange(mask.shape[-1], device=mask.device)
        last_token = (mask * positions).argmax(dim=-1)
        rewards = torch.zeros(responses.shape, dtype=torch.float32)
        rewards[graded, last_token.cpu()[graded]] = torch.from_numpy(info["score"])[graded]
        self._show_examples(data, sources, texts, info)
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": info, "metrics": _metrics(sources, info)}

    def has_rule(self, data_source: Any, reward_model: Any) -> bool:
        """Whether a row can be graded: by the user's function, or by a known source that has a ground truth."""
        if self.compute_score is not None:
            return True
        return data_source in known_sources() and _ground_truth(reward_model) is not None

    def check(self, data_sources: Sequence[Any], reward_models: Sequence[Any]) -> None:
        """Raise now, not in the middle of a run, if some rows of the data have no rule."""
        pairs = list(zip(data_sources, reward_models, strict=True))
        if all(self.has_rule(source, reward_model) for source, reward_model in pairs):
            return
        unknown = Counter(source for source, _ in pairs if source not in known_sources())
        for source, count in unknown.items():
            try:
                get_scorer(source)
            except UnknownDataSourceError as error:
                raise UnknownDataSourceError(f"{error} {count} of {len(pairs)} rows have this source.") from None
        rows = [row for row, (_, reward_model) in enumerate(pairs) if _ground_truth(reward_model) is None]
        raise DataError(
            f"{len(rows)} of {len(pairs)} rows have no reward_model.ground_truth, the first is row {rows[0]} "
            f"({self.reward_fn_key}={pairs[rows[0]][0]!r}). Add it, or set custom_reward_function.path."
        )

    def _decode(self, responses: torch.Tensor, mask: torch.Tensor) -> list[str]:
        tokens = [row[valid].tolist() for row, valid in zip(responses, mask, strict=True)]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def _sources(self, data: DataProto) -> list[Any]:
        column = data.non_tensor_batch.get(self.reward_fn_key)
        if column is not None:
            return list(column)
        if self.compute_score is None:
            raise DataError(
                f"The batch has no column {self.reward_fn_key!r}, which names the scorer; it has "
                f"{', '.join(sorted(data.non_tensor_batch)) or 'none'}. Add the column to the data files, "
                "set data.reward_fn_key, or set custom_reward_function.path."
            )
        return ["custom"] * len(data.batch["responses"])

    def _grade(
        self, data: DataProto, sources: list[Any], texts: list[str], rows: list[int]
    ) -> dict[int, dict[str, Any]]:
        """Grade these rows, all of one source together. A scorer's failure is the row's result, never the run's end."""
        ground_truths = _cells(data, "reward_model", _ground_truth)
        extra_infos = _cells(data, "extra_info")
        results: dict[int, ScoreResult] = {}
        if self.compute_score is None:
            self.check(sources, _cells(data, "reward_model"))
            for source in dict.fromkeys(sources[row] for row in rows):
                chosen = [row for row in rows if sources[row] == source]
                arguments = [[column[row] for row in chosen] for column in (texts, ground_truths, extra_infos)]
                results.update(zip(chosen, _score_source(source, *arguments), strict=True))
        else:
            for row in rows:
                results[row] = _attempt(
                    self.compute_score,
                    data_source=sources[row],
                    solution_str=texts[row],
                    ground_truth=ground_truths[row],
                    extra_info=extra_infos[row],
                )
        checked = {row: _checked(result) for row, result in results.items()}
        failures = [(row, result) for row, result in checked.items() if isinstance(result, Exception)]
        if failures:
            row, error = failures[0]
            if len(failures) == len(rows):
                raise RewardError(
                    f"grading failed for all {len(rows)} responses of a batch; the first, of source {sources[row]!r} "
                    f"with ground truth {ground_truths[row]!r}: {error!r}."
                ) from error
            logger.error(
                "Grading failed for %d of %d responses, which score 0 and count as reward/grader_errors. The first, "
                "of source %r with ground truth %r: %r",
                len(failures), len(rows), sources[row], ground_truths[row], error, exc_info=error,
            )  # fmt: skip
        return {
            row: {"score": 0.0, "grader_error": True} if isinstance(result, Exception) else result
            for row, result in checked.items()
        }

    def _show_examples(
        self, data: DataProto, sources: list[Any], texts: list[str], info: dict[str, np.ndarray]
    ) -> None:
        shown: Counter[Any] = Counter()
        ground_truths = _cells(data, "reward_model", _ground_truth)
        prompt_length = data.batch["prompts"].shape[-1]
        for row, source in enumerate(sources):
            if shown[source] >= self.num_examine:
                continue
            shown[source] += 1
            valid = data.batch["attention_mask"][row, :prompt_length].bool()
            prompt = self.tokenizer.decode(data.batch["prompts"][row][valid].tolist(), skip_special_tokens=True)
            logger.info(
                "Example of %s\n[prompt] %s\n[response] %s\n[ground truth] %s\n[score] %g",
                source, prompt, texts[row], ground_truths[row], info["score"][row],
            )  # fmt: skip


def _score_source(source: Any, texts: list[str], ground_truths: list[Any], extra_infos: list[Any]) -> list[ScoreResult]:
    scorer = get_scorer(source)
    if scorer.many is None:
        return [
            _attempt(scorer.one, solution_str=text, ground_truth=ground_truth, extra_info=extra_info)
            for text, ground_truth, extra_info in zip(texts, ground_truths, extra_infos, strict=True)
        ]
    results = _attempt(scorer.many, texts, ground_truths, extra_infos)
    if isinstance(results, Exception):
        return [results] * len(texts)
    if len(results) != len(texts):
        return [ValueError(f"the batch scorer gave {len(results)} results for {len(texts)} responses")] * len(texts)
    return list(results)


def _attempt(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        return error


def _checked(result: ScoreResult) -> dict[str, Any] | Exception:
    """A dict with a finite float `score`, or why there is none."""
    if isinstance(result, TimeoutError):
        return {"score": 0.0, "timeout": True}
    if isinstance(result, Exception):
        return result
    values = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        values["score"] = float(values["score"])
    except KeyError:
        return ValueError(f"the scorer returned a dict without `score`; it has {', '.join(map(str, values))}")
    except (TypeError, ValueError):
        return ValueError(f"the scorer returned {values['score']!r} as a score, which is no number")
    if not math.isfinite(values["score"]):
        return ValueError(f"the scorer returned the score {values['score']}")
    return values


def _extra_info(results: dict[int, dict[str, Any]], num_rows: int) -> dict[str, np.ndarray]:
    """One array (batch,) per key of the results; a row without the key has NaN, or None where values are no numbers."""
    rows = [results.get(row, {"score": 0.0, "empty": True, "extracted": False}) for row in range(num_rows)]
    info: dict[str, np.ndarray] = {"score": np.array([row["score"] for row in rows], dtype=np.float32)}
    for flag in FLAGS:
        default = flag == "extracted"
        info[flag] = np.array([bool(row.get(flag, default)) for row in rows], dtype=bool)
    for key in dict.fromkeys(key for row in rows for key in row if key not in info):
        values = [row.get(key) for row in rows]
        if all(isinstance(value, int | float | np.number | None) for value in values):
            info[key] = np.array([math.nan if value is None else value for value in values], dtype=np.float32)
        else:
            info[key] = np.empty(num_rows, dtype=object)
            info[key][:] = values
    if "acc" in info:
        info["acc"][info["empty"]] = 0.0  # silence is wrong, not ungraded
    return info


def _metrics(sources: list[Any], info: dict[str, np.ndarray]) -> dict[str, float]:
    """Means by source, and how many responses could not be graded, apart from those that were wrong."""
    attempted = ~info["empty"] & ~info["grader_error"]
    failed = attempted & ~info["extracted"]
    metrics = {
        "reward/extraction_failed_rate": float(failed.sum() / max(attempted.sum(), 1)),
        "reward/extraction_failed": float(failed.sum()),
        "reward/grader_timeouts": float(info["timeout"].sum()),
        "reward/grader_errors": float(info["grader_error"].sum()),
        "reward/empty_responses": float(info["empty"].sum()),
    }
    for source in dict.fromkeys(sources):
        rows = np.array([other == source for other in sources])
        metrics[f"reward/{source}/score"] = float(info["score"][rows].mean())
        if "acc" in info and info["acc"].dtype != object and not np.isnan(info["acc"][rows]).all():
            metrics[f"reward/{source}/acc"] = float(np.nanmean(info["acc"][rows]))
    return metrics


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _cells(data: DataProto, key: str, read: Callable[[Any], Any] = lambda cell: cell) -> list[Any]:
    """A non-tensor column as a list; Nones if the batch has none."""
    column = data.non_tensor_batch.get(key)
    return [None] * len(data.batch["responses"]) if column is None else [read(cell) for cell in column]
