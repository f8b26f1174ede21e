"""What a scorer is: who grades rows, how it is called, and what its failures mean.

A `Scorer` is the rule of a data source. A `RewardFunction` is the user's function for the rows of all sources. Both
grade one response or a batch in a call, plain or async. Calls of the user's code have a deadline, and then run in a
process that can be killed. Whatever a call raises stands in the place of its result; `grading.py` says what follows.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial

from paceline.errors import ConfigError
from paceline.rewards.killable import function_process, pickled
from paceline.rewards.killable_side import Call, attempt, event_loop

__all__ = ["RULE_KEYWORDS", "BatchScoreFn", "RewardFunction", "Row", "RowScorer", "ScoreFn", "Scorer", "check_keywords"]

ITEM_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
RULE_KEYWORDS = ITEM_KEYWORDS[1:]

ScoreFn = Callable[..., float | Mapping[str, object]]
"""`fn(solution_str, ground_truth, extra_info=None)`: a score, or a dict with `score` and whatever else to keep."""
BatchScoreFn = Callable[..., Sequence[float | Mapping[str, object] | Exception]]
"""The same for many rows: solutions, ground truths and extra infos in; for each a result, or what went wrong."""


@dataclass(frozen=True)
class Row:
    """What scorers see of a row. The fields are in the order of ITEM_KEYWORDS."""

    data_source: object
    solution_str: str
    ground_truth: object
    extra_info: object

    def values(self) -> tuple[object, ...]:
        return (self.data_source, self.solution_str, self.ground_truth, self.extra_info)


class RowScorer(ABC):
    """Grades rows with a function: a call for each row, or one for all of them."""

    together = False
    """Rows belong together: if one fails, all are graded again."""

    @abstractmethod
    def function(self) -> Callable[..., object]:
        """The function that is called."""

    @abstractmethod
    def calls(self, rows: Sequence[Row]) -> tuple[list[Call], bool]:
        """The arguments of each call, and whether the one call is for all rows."""

    def deadline(self, timeout_seconds: float | None) -> float | None:
        """The seconds that a call may take, with `reward_model.timeout_seconds`; None if there is no limit."""
        return timeout_seconds

    def timeouts_fail(self, timeout_seconds: float | None) -> bool:
        """Whether a TimeoutError is a failure, as of a service that does not answer. Else it is a verdict: the answer
        was too hard to compare in time, and would be again."""
        return True

    def source(self) -> bytes:
        """How another process finds the function."""
        return pickled(self.function())

    def grade(self, rows: Sequence[Row], timeout_seconds: float | None = None) -> list[object]:
        """A result for each row, not checked yet; an exception stands for a failure.

        With a deadline, the calls run in another process, which can be killed.
        """
        calls, is_batch = self.calls(rows)
        deadline = self.deadline(timeout_seconds)
        if deadline is None:
            fn = self.function()
            results = _awaited([attempt(fn, call, catch=Exception) for call in calls])
        else:
            results = function_process(self.source()).call_all(calls, deadline)
        return _one_each(results[0], len(rows)) if is_batch else results


@dataclass(frozen=True)
class Scorer(RowScorer):
    """The rule of a data source: a function for one response, and one for many at once if there is a faster way.

    It may be the user's, and then has a deadline; ours end by themselves.
    """

    one: ScoreFn
    many: BatchScoreFn | None = None
    check: Callable[[], None] | None = None
    """Called once before a run whose data has the source: raises if the scorer can't work."""
    check_truth: Callable[[object], None] | None = None
    """Called before a run for every ground truth of the source: raises a `DataError` if it is of no use."""

    def function(self) -> Callable[..., object]:
        return self.one if self.many is None else self.many

    def calls(self, rows: Sequence[Row]) -> tuple[list[Call], bool]:
        if self.many is not None:
            return [(tuple(_columns(rows)[1:]), {})], True
        return [((), dict(zip(RULE_KEYWORDS, row.values()[1:], strict=True))) for row in rows], False

    def deadline(self, timeout_seconds: float | None) -> float | None:
        fn: object = self.one
        while isinstance(fn, partial):
            fn = fn.func
        is_ours = (getattr(fn, "__module__", None) or "").startswith("paceline.")
        return None if is_ours else timeout_seconds

    def timeouts_fail(self, timeout_seconds: float | None) -> bool:
        return self.deadline(timeout_seconds) is not None


class RewardFunction(RowScorer):
    """A function of the user's for the rows of all sources, in one of two forms, plain or async:

        fn(data_source, solution_str, ground_truth, extra_info)         gives a number, or a dict with `score`
        fn(data_sources, solution_strs, ground_truths, extra_infos)     gives a list of those, for a batch

    Its signature says which form it is. Raises a ConfigError if it fits none.

    Args:
        fn: the function.
        kwargs: further keyword arguments that it is always called with.
        what: names it in messages.
    """

    def __init__(
        self, fn: Callable[..., object], kwargs: Mapping[str, object] | None = None, what: str = "compute_score"
    ) -> None:
        self.fn = fn
        self.kwargs = dict(kwargs or {})
        self.is_batch = self.together = _takes_batches(fn, tuple(self.kwargs), what)

    def __call__(self, **kwargs: object) -> object:
        return self.fn(**kwargs, **self.kwargs)

    def function(self) -> Callable[..., object]:
        return self.fn

    def calls(self, rows: Sequence[Row]) -> tuple[list[Call], bool]:
        keywords = BATCH_KEYWORDS if self.is_batch else ITEM_KEYWORDS
        arguments = [_columns(rows)] if self.is_batch else [row.values() for row in rows]
        calls: list[Call] = [((), {**dict(zip(keywords, values, strict=True)), **self.kwargs}) for values in arguments]
        return calls, self.is_batch


def check_keywords(fn: Callable[..., object], wanted: Sequence[str], what: str) -> None:
    """Raise a `ConfigError` unless `fn` can be called with exactly these keyword arguments."""
    signature = _signature(fn, what)
    try:
        signature.bind(**dict.fromkeys(wanted))
    except TypeError as error:
        raise ConfigError(
            f"{what} is called with the keywords {', '.join(wanted)}, but is {_name(fn)}{signature}: {error}. "
            f"Write it as {_name(fn)}({', '.join(wanted)})."
        ) from None


def _takes_batches(fn: Callable[..., object], further: tuple[str, ...], what: str) -> bool:
    """Whether `fn` wants the keywords of a batch; False if it takes those of one response."""
    signature = _signature(fn, what)
    if taken := sorted(set(further) & {*ITEM_KEYWORDS, *BATCH_KEYWORDS}):
        raise ConfigError(
            f"custom_reward_function.reward_kwargs has {', '.join(taken)}, which the data gives. Rename it."
        )
    misfits = []
    for keywords in (ITEM_KEYWORDS, BATCH_KEYWORDS):
        try:
            signature.bind(**dict.fromkeys((*keywords, *further)))
        except TypeError as error:
            misfits.append(str(error))
        else:
            return keywords is BATCH_KEYWORDS
    name = _name(fn)
    item, batch = (f"{name}({', '.join((*keywords, *further))})" for keywords in (ITEM_KEYWORDS, BATCH_KEYWORDS))
    source = f" ({', '.join(further)}: from custom_reward_function.reward_kwargs)" if further else ""
    raise ConfigError(
        f"{what} is {name}{signature}. Write it as {item} for one response ({misfits[0]}), or as {batch} for a batch "
        f"({misfits[1]}){source}."
    )


def _signature(fn: Callable[..., object], what: str) -> inspect.Signature:
    if not callable(fn):
        raise ConfigError(f"{what} must be a function, not {type(fn).__name__}.")
    try:
        return inspect.signature(fn)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}. Wrap it in a function of Python.") from None


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _columns(rows: Sequence[Row]) -> list[list[object]]:
    return [list(column) for column in zip(*(row.values() for row in rows), strict=True)]


def _one_each(results: object, num_rows: int) -> list[object]:
    """The results of a batch, or for every row why there are none."""
    if isinstance(results, BaseException):
        return [results] * num_rows
    if (
        isinstance(results, str | bytes | Mapping)
        or not isinstance(results, Sized)
        or not isinstance(results, Iterable)
    ):
        problem = f"the batch function returned {type(results).__name__}, not a list of {num_rows} results"
        return [TypeError(problem)] * num_rows
    if len(results) != num_rows:
        return [ValueError(f"the batch function gave {len(results)} results for {num_rows} responses")] * num_rows
    return list(results)


def _awaited(results: list[object]) -> list[object]:
    """The same with everything that is awaitable awaited, all together; an exception stands for a failure."""
    waiting = [result for result in results if inspect.isawaitable(result)]
    if not waiting:
        return results
    future = asyncio.run_coroutine_threadsafe(_gathered(waiting), event_loop(os.getpid()))
    try:
        answers = iter(future.result())
    except BaseException:
        future.cancel()
        raise
    return [next(answers) if inspect.isawaitable(result) else result for result in results]


async def _gathered(waiting: list[Awaitable[object]]) -> list[object]:
    return await asyncio.gather(*waiting, return_exceptions=True)
