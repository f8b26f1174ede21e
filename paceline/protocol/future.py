"""The promise of a batch that is still being computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.protocol.batch import DataProto

Values = list[Any]
"""What the parts of a future are, or what they become."""
Collect = Callable[[Values], Any]
Getter = Callable[[Values], Values]


@dataclass(frozen=True)
class _TakeChunk:
    """A picklable collect function: collect as `collect_fn` does, then keep chunk `index` of `chunks`."""

    collect_fn: Collect
    index: int
    chunks: int

    def __call__(self, values: Values) -> DataProto:
        return self.collect_fn(values).chunk(self.chunks)[self.index]


@dataclass(frozen=True)
class _Joined:
    """A picklable function for the parts of several futures in a row: each of `functions` gets its share, by count."""

    functions: tuple[Collect, ...]
    counts: tuple[int, ...]
    join: Collect

    def __call__(self, items: Values) -> Any:
        remaining = iter(items)
        shares = [list(itertools.islice(remaining, count)) for count in self.counts]
        return self.join([function(share) for function, share in zip(self.functions, shares, strict=True)])


def _flat(lists: list[Values]) -> Values:
    return [value for values in lists for value in values]


@dataclass(eq=False)
class _Applied:
    """The part of a future that came from `then`: what a function makes of a future's result, computed once."""

    future: DataProtoFuture
    function: Callable[[Any], Any]

    @cached_property
    def value(self) -> Any:
        return self.function(self.future.get())


def _apply(parts: list[_Applied]) -> list[Any]:
    return [part.value for part in parts]


def _as_they_are(parts: list[Any]) -> list[Any]:
    return parts


def _only_one(values: list[Any]) -> Any:
    return values[0]


@dataclass(frozen=True, eq=False)
class DataProtoFuture:
    """The promise of a batch whose parts are being computed elsewhere.

    `parts` are opaque references, `getter(parts)` waits for their values, `collect_fn(values)` joins them (and may
    remove padding). `selection` is `(index, chunks)` for a future that came from `chunk`, None for a whole one.

    `get()` does all of it here. A worker that received the values of `parts` another way calls `resolver(values)`,
    which holds neither references nor the getter and is picklable when `collect_fn` is.
    """

    parts: Values
    collect_fn: Collect
    getter: Getter
    selection: tuple[int, int] | None = None

    @property
    def resolver(self) -> Collect:
        """The function from the values of `parts` to what `get` gives."""
        return self.collect_fn if self.selection is None else _TakeChunk(self.collect_fn, *self.selection)

    def get(self) -> Any:
        """Wait for all parts, collect them, keep the selected rows."""
        return self.resolver(self.getter(self.parts))

    @staticmethod
    def of(value: Any) -> DataProtoFuture:
        """The future of something that is there already."""
        return DataProtoFuture([value], _only_one, _as_they_are)

    def then(self, function: Callable[[Any], Any]) -> DataProtoFuture:
        """The future of `function(result)`; waits for nothing.

        The first `get` waits and calls the function, in the process that asks; later ones give the same object again.
        After an error, of the result or of the function, the next `get` tries again. A worker group that gets such a
        future as an argument has the driver wait for it, as only the driver has the function.
        """
        return DataProtoFuture([_Applied(self, function)], _only_one, _apply)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` futures of equal, consecutive row ranges; waits for nothing.

        Rows that do not divide are an error when a chunk is resolved: their number is not known before.
        """
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; it must be at least 1.")
        return [DataProtoFuture(self.parts, self.resolver, self.getter, (index, chunks)) for index in range(chunks)]

    @staticmethod
    def concat(futures: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """One future of the rows of all, in order; waits for nothing."""
        if not futures:
            raise ValueError("DataProtoFuture.concat got an empty list; give it at least one future.")
        counts = tuple(len(future.parts) for future in futures)
        return DataProtoFuture(
            parts=_flat([future.parts for future in futures]),
            collect_fn=_Joined(tuple(future.resolver for future in futures), counts, DataProto.concat),
            # Each waits with its own, which knows whose parts they are.
            getter=_Joined(tuple(future.getter for future in futures), counts, _flat),
        )
