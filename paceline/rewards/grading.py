"""From rows to checked results: what a failure is, and what happens then."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline.errors import PacelineError, RewardError
from paceline.rewards.function_server import Call
from paceline.rewards.functions import RewardFunction, Row, attempt, one_each, pickled, settle
from paceline.rewards.killable import function_process
from paceline.rewards.scorers import Scorer

__all__ = ["Grader", "OnError", "grade_all", "grader_of_function", "grader_of_scorer"]

logger = logging.getLogger(__name__)

OnError = Literal["raise", "retry", "zero_and_count"]
Result = dict[str, Any] | Exception

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class Grader:
    """Grades rows of one kind."""

    grade: Callable[[Sequence[Row]], list[Any]]
    """A result for each row, not checked yet; an exception stands for a failure."""
    together: bool = False
    """Rows belong together: if one fails, all are graded again."""
    timeouts_fail: bool = False
    """A TimeoutError is a failure, as of a service that does not answer. Else it is a verdict: the answer was too hard
    to compare in time, and would be again."""


def grader_of_function(function: RewardFunction, timeout_seconds: float | None = None) -> Grader:
    """The user's function for all rows, with a time-out for each call."""
    grade = partial(function.grade, timeout_seconds=timeout_seconds)
    return Grader(grade, together=function.is_batch, timeouts_fail=True)


def grader_of_scorer(scorer: Scorer, timeout_seconds: float | None = None) -> Grader:
    """The rule of a source. The time-out is for each call of a rule of the user's; ours end by themselves."""
    has_deadline = timeout_seconds is not None and not _is_ours(scorer.one)

    def grade(rows: Sequence[Row]) -> list[Any]:
        columns = [
            [row.solution_str for row in rows],
            [row.ground_truth for row in rows],
            [row.extra_info for row in rows],
        ]
        if scorer.many is not None:
            [results] = call_all(scorer.many, [(tuple(columns), {})])
            return one_each(results, len(rows))
        names = ("solution_str", "ground_truth", "extra_info")
        return call_all(scorer.one, [((), dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)])

    def call_all(fn: Callable[..., Any], calls: list[Call]) -> list[Any]:
        if has_deadline and timeout_seconds is not None:
            return function_process(pickled(fn)).call_all(calls, timeout_seconds)
        return settle([attempt(fn, *args, **kwargs) for args, kwargs in calls])

    return Grader(grade, timeouts_fail=has_deadline)


def _is_ours(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, partial):
        fn = fn.func
    return (getattr(fn, "__module__", None) or "").startswith("paceline.")


def grade_all(
    groups: Sequence[tuple[Grader, dict[int, Row]]], on_error: OnError | None, max_retries: int
) -> dict[int, dict[str, Any]]:
    """By place in the batch, a dict with a finite `score` for every row; `grader_error` marks those that failed.

    `raise`: the first failure is a RewardError. `retry`: what fails is graded again up to max_retries times, after
    growing pauses, and `retries` of a row says how often. None: a RewardError if all rows fail.
    """
    results: dict[int, dict[str, Any]] = {}
    failures: dict[int, Exception] = {}
    rows = {place: row for _, group in groups for place, row in group.items()}
    for grader, group in groups:
        graded, retries = _grade_group(grader, list(group.values()), max_retries if on_error == "retry" else 0)
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


def _grade_group(grader: Grader, rows: Sequence[Row], max_retries: int) -> tuple[list[Result], list[int]]:
    """Results, and how many further attempts each took."""
    results = _graded(grader, rows)
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
        again = list(range(len(rows))) if grader.together else failed
        for place, result in zip(again, _graded(grader, [rows[place] for place in again]), strict=True):
            results[place] = result
            retries[place] += 1
    return results, retries


def _graded(grader: Grader, rows: Sequence[Row]) -> list[Result]:
    return [_checked(result, grader.timeouts_fail) for result in grader.grade(rows)]


def _may_pass(result: Result) -> bool:
    """Whether another attempt may end better; our own errors are about the data or the machine, which don't change."""
    return isinstance(result, Exception) and not isinstance(result, PacelineError)


def _checked(result: Any, timeouts_fail: bool) -> Result:
    """A dict with a finite float `score`, or why there is none."""
    if isinstance(result, TimeoutError) and not timeouts_fail:
        return {"score": 0.0, "timeout": True}
    if isinstance(result, Exception):
        return result
    if isinstance(result, BaseException):  # such as a cancelled task, which is no Exception
        return RuntimeError(f"the scorer ended with {result!r}")
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
