"""The promise of a batch that is still being computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.protocol.batch import DataProto


@dataclass(frozen=True)
class _TakeChunk:
    """A picklable collect function: collect as `collect_fn` does, then keep chunk `index` of `chunks`."""

    collect_fn: Callable[[list[Any]], Any]
    index: int
    chunks: int

    def __call__(self, values: list[Any]) -> Any:
        return self.collect_fn(values).chunk(self.chunks)[self.index]


@dataclass(frozen=True)
class _ByShare:
    """Gives each function its share of a list, by count, and the results of all: for several futures in a row."""

    functions: tuple[Callable[[list[Any]], Any], ...]
    counts: tuple[int, ...]

    def __call__(self, items: list[Any]) -> list[Any]:
        remaining = iter(items)
        shares = [list(itertools.islice(remaining, count)) for count in self.counts]
        return [function(share) for function, share in zip(self.functions, shares, strict=True)]


@dataclass(frozen=True)
class _JoinCollected:
    """A picklable collect function for the parts of several futures in a row: collect each its own way, then join."""

    collect: _ByShare

    def __call__(self, values: list[Any]) -> DataProto:
        return DataProto.concat(self.collect(values))


@dataclass(frozen=True)
class _GetEach:
    """A getter for the parts of several futures in a row. Each waits with its own, which knows whose parts they are."""

    get: _ByShare

    def __call__(self, parts: list[Any]) -> list[Any]:
        return [value for values in self.get(parts) for value in values]


@dataclass(frozen=True, eq=False)
class DataProtoFuture:
    """The promise of a batch whose parts are being computed elsewhere.

    `parts` are opaque references, `getter(parts)` waits for their values, `collect_fn(values)` joins them (and may
    remove padding). `selection` is `(index, chunks)` for a future that came from `chunk`, None for a whole one.

    `get()` does all of it here. A worker that received the values of `parts` another way calls `resolver(values)`,
    which holds neither references nor the getter and is picklable when `collect_fn` is.
    """

    parts: list[Any]
    collect_fn: Callable[[list[Any]], Any]
    getter: Callable[[list[Any]], list[Any]]
    selection: tuple[int, int] | None = None

    @property
    def resolver(self) -> Callable[[list[Any]], Any]:
        """The function from the values of `parts` to what `get` gives."""
        return self.collect_fn if self.selection is None else _TakeChunk(self.collect_fn, *self.selection)

    def resolve(self, values: list[Any]) -> Any:
        """What `get` gives, from the values of `parts`."""
        return self.resolver(values)

    def get(self) -> Any:
        """Wait for all parts, collect them, keep the selected rows."""
        return self.resolve(self.getter(self.parts))

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
            parts=[part for future in futures for part in future.parts],
            collect_fn=_JoinCollected(_ByShare(tuple(future.resolver for future in futures), counts)),
            getter=_GetEach(_ByShare(tuple(future.getter for future in futures), counts)),
        )
