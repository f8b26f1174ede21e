"""From rows to checked results: what a failure is, and what happens then."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Sequence
from typing import Any, Literal

from paceline.errors import PacelineError, RewardError
from paceline.rewards.scorer import Row, RowScorer

__all__ = ["OnError", "grade_all"]

logger = logging.getLogger(__name__)

OnError = Literal["raise", "retry", "zero_and_count"]
Result = dict[str, object]

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


def grade_all(
    groups: Sequence[tuple[RowScorer, dict[int, Row]]],
    on_error: OnError | None,
    max_retries: int,
    timeout_seconds: float | None,
) -> dict[int, Result]:
    """By place in the batch, a dict with a finite `score` for every row; `grader_error` marks those that failed.

    `raise`: the first failure is a RewardError. `retry`: what fails is graded again up to max_retries times, after
    growing pauses, and `retries` of a row says how often. None: a RewardError if all rows fail. `timeout_seconds` is
    for each call of a function of the user's.
    """
    results: dict[int, Result] = {}
    failures: dict[int, Exception] = {}
    rows = {place: row for _, group in groups for place, row in group.items()}
    for scorer, group in groups:
        retries_left = max_retries if on_error == "retry" else 0
        graded, retries = _grade_group(scorer, list(group.values()), retries_left, timeout_seconds)
        for place, result, count in zip(group, graded, retries, strict=True):
            if isinstance(result, Exception):
                failures[place] = result
                timeout = isinstance(result, TimeoutError)
                result = {"score": 0.0, "grader_error": True, "timeout": timeout, "error": repr(result)}
            results[place] = {**result, "retries": count} if on_error == "retry" else result
        if failures and on_error == "raise":
            break
    if failures:
        place, error = next(iter(failures.items()))
        all_failed = len(failures) == len(rows)
        source, truth = rows[place].data_source, reprlib.repr(rows[place].ground_truth)
        what = (
            f"Grading failed for {'all' if all_failed else f'{len(failures)} of'} {len(rows)} responses; the first, of "
            f"source {source!r} with ground truth {truth}"
        )
        if on_error == "raise" or (on_error is None and all_failed):
            raise RewardError(f"{what}: {error!r}.") from error
        logger.error("%s: %r. They score 0 and count as reward/grader_errors.", what, error, exc_info=error)
    return results


def _grade_group(
    scorer: RowScorer, rows: Sequence[Row], max_retries: int, timeout_seconds: float | None
) -> tuple[list[Result | Exception], list[int]]:
    """Results, and how many further attempts each took."""

    def graded(rows: Sequence[Row]) -> list[Result | Exception]:
        timeouts_fail = scorer.timeouts_fail(timeout_seconds)
        return [_checked(result, timeouts_fail) for result in scorer.grade(rows, timeout_seconds)]

    results = graded(rows)
    retries = [0] * len(rows)
    for number in range(max_retries):
        failed = [place for place, result in enumerate(results) if _may_pass(result)]
        if not failed:
            break
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**number)
        logger.warning(
            "Grading failed for %d of %d responses; attempt %d of %d follows in %.1f s. The first failure: %r",
            len(failed), len(rows), number + 1, max_retries, pause, results[failed[0]],
        )  # fmt: skip
        time.sleep(pause)
        again = list(range(len(rows))) if scorer.together else failed
        for place, result in zip(again, graded([rows[place] for place in again]), strict=True):
            results[place] = result
            retries[place] += 1
    return results, retries


def _may_pass(result: Result | Exception) -> bool:
    """Whether another attempt may end better; our own errors are about the data or the machine, which don't change."""
    return isinstance(result, Exception) and not isinstance(result, PacelineError)


def _checked(result: object, timeouts_fail: bool) -> Result | Exception:
    """A dict with a finite float `score`, or why there is none."""
    if isinstance(result, TimeoutError) and not timeouts_fail:
        return {"score": 0.0, "timeout": True}
    if isinstance(result, Exception):
        return result
    if isinstance(result, BaseException):  # such as a cancelled task, which is no Exception
        return RuntimeError(f"the scorer ended with {result!r}")
    values: dict[str, Any] = dict(result) if isinstance(result, dict) else {"score": result}
    try:
        score = float(values["score"])
    except KeyError:
        return ValueError(f"the scorer returned a dict without `score`; it has {', '.join(map(str, values))}")
    except (TypeError, ValueError):
        return ValueError(f"the scorer returned {values['score']!r} as a score, which is not a number")
    if not math.isfinite(score):
        return ValueError(f"the scorer returned the score {score}")
    return {**values, "score": score}
