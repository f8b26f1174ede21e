"""Reward functions of the user's: for one response or for a batch, plain or async, called in one way.

One response: `fn(data_source, solution_str, ground_truth, extra_info)` gives a number, or a dict with `score`.
A batch: `fn(data_sources, solution_strs, ground_truths, extra_infos)` gives a list of those. Which one it is, its
signature says.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import cloudpickle

from paceline.errors import ConfigError
from paceline.rewards.killable import function_process

__all__ = ["BATCH_KEYWORDS", "ITEM_KEYWORDS", "RewardFunction", "Row", "attempt", "one_each", "pickled", "settle"]

ITEM_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class Row:
    """What graders see of a row. The fields are in the order of ITEM_KEYWORDS."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any

    def values(self) -> tuple[Any, ...]:
        return (self.data_source, self.solution_str, self.ground_truth, self.extra_info)


class RewardFunction:
    """A function of any of the four forms. Raises a ConfigError if its signature fits none.

    Args:
        fn: the function.
        kwargs: further keyword arguments that it is always called with.
        what: names it in messages.
    """

    def __init__(
        self, fn: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, what: str = "compute_score"
    ) -> None:
        self.fn = fn
        self.kwargs = dict(kwargs or {})
        self.is_batch = _takes_batches(fn, tuple(self.kwargs), what)

    def __call__(self, **kwargs: Any) -> Any:
        return self.fn(**kwargs, **self.kwargs)

    def source(self) -> bytes:
        """How another process finds the function."""
        return pickled(self.fn)

    def grade(self, rows: Sequence[Row], timeout_seconds: float | None = None) -> list[Any]:
        """A result for each row, not checked yet; an exception stands for a failure.

        With a time-out for each call, the calls run in another process, which can be killed.
        """
        if self.is_batch:
            columns = [list(column) for column in zip(*(row.values() for row in rows), strict=True)]
            calls = [dict(zip(BATCH_KEYWORDS, columns, strict=True))]
        else:
            calls = [dict(zip(ITEM_KEYWORDS, row.values(), strict=True)) for row in rows]
        if timeout_seconds is None:
            results = settle([attempt(self, **call) for call in calls])
        else:
            there = function_process(self.source())
            results = there.call_all([((), {**call, **self.kwargs}) for call in calls], timeout_seconds)
        return one_each(results[0], len(rows)) if self.is_batch else results


def pickled(fn: Callable[..., Any]) -> bytes:
    """A function for `function_process`, always the same bytes for the same function."""
    if id(fn) not in _PICKLED:
        _PICKLED[id(fn)] = (fn, cloudpickle.dumps(("function", fn)))
    return _PICKLED[id(fn)][1]


_PICKLED: dict[int, tuple[Callable[..., Any], bytes]] = {}  # holds the function, so that its id stays its own


def attempt(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call gives, or what it raises."""
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        return error


def one_each(results: Any, num_rows: int) -> list[Any]:
    """The results of a batch, or for every row why there are none."""
    if isinstance(results, BaseException):
        return [results] * num_rows
    if (
        isinstance(results, str | bytes | Mapping)
        or not hasattr(results, "__len__")
        or not hasattr(results, "__iter__")
    ):
        problem = f"the batch function returned {type(results).__name__}, not a list of {num_rows} results"
        return [TypeError(problem)] * num_rows
    if len(results) != num_rows:
        return [ValueError(f"the batch function gave {len(results)} results for {num_rows} responses")] * num_rows
    return list(results)


def settle(results: list[Any]) -> list[Any]:
    """The same with everything that is awaitable awaited, all together; an exception stands for a failure."""
    waiting = [result for result in results if inspect.isawaitable(result)]
    if not waiting:
        return results
    future = asyncio.run_coroutine_threadsafe(_gathered(waiting), _event_loop(os.getpid()))
    try:
        answers = iter(future.result())
    except BaseException:
        future.cancel()
        raise
    return [next(answers) if inspect.isawaitable(result) else result for result in results]


async def _gathered(waiting: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=True)


@cache
def _event_loop(pid: int) -> asyncio.AbstractEventLoop:
    """One loop for the whole life of a process, so that a user's client or session can be kept between batches."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop


def _takes_batches(fn: Callable[..., Any], further: tuple[str, ...], what: str) -> bool:
    """Whether `fn` wants the keywords of a batch; False if it takes those of one response."""
    if not callable(fn):
        raise ConfigError(f"{what} must be a function, not {type(fn).__name__}.")
    if taken := sorted(set(further) & {*ITEM_KEYWORDS, *BATCH_KEYWORDS}):
        raise ConfigError(
            f"custom_reward_function.reward_kwargs has {', '.join(taken)}, which the data gives. Rename it."
        )
    try:
        signature = inspect.signature(fn)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}. Wrap it in a function of Python.") from None
    misfits = []
    for keywords in (ITEM_KEYWORDS, BATCH_KEYWORDS):
        try:
            signature.bind(**dict.fromkeys((*keywords, *further)))
        except TypeError as error:
            misfits.append(str(error))
        else:
            return keywords is BATCH_KEYWORDS
    name = getattr(fn, "__name__", type(fn).__name__)
    item, batch = (f"{name}({', '.join((*keywords, *further))})" for keywords in (ITEM_KEYWORDS, BATCH_KEYWORDS))
    source = f" ({', '.join(further)}: from custom_reward_function.reward_kwargs)" if further else ""
    raise ConfigError(
        f"{what} is {name}{signature}. Write it as {item} for one response ({misfits[0]}), or as {batch} for a batch "
        f"({misfits[1]}){source}."
    )
