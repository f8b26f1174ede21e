"""Columns that a batch holds without having them here: rows of tensors that lie elsewhere, or that came as stretches.

A `HeldColumn` says which rows of which sources it is. Choosing, ordering, joining and sending rows moves these numbers
alone; reading the column fetches it, once. In a batch it stands in the TensorDict under its name, where reading it in
any way gives the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from paceline.protocol.allocation import cat, uninitialised
from paceline.protocol.stretches import Stretches
from paceline.protocol.transport import Sent

if TYPE_CHECKING:
    from tensordict import TensorDict


class StoredRows(ABC):
    """Rows of one column that lie somewhere, and can be fetched from anywhere."""

    @abstractmethod
    def __len__(self) -> int: ...

    @classmethod
    @abstractmethod
    def fetch(cls, wanted: Sequence[tuple[Self, np.ndarray]]) -> list[Tensor]:
        """These rows of each, all at once. They may be memory that others read too."""


Source: TypeAlias = Tensor | Stretches | StoredRows


class HeldColumn:
    """Rows `index` of `sources` put one behind another; all have this dtype and shape of a row.

    `is_finite` says that whoever made the column found all of its numbers finite.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        sources: Sequence[Source],
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        index: np.ndarray | None = None,
        *,
        is_finite: bool = False,
    ) -> None:
        self.sources = tuple(sources)
        self.dtype = dtype
        self.row_shape = row_shape
        self.index = np.arange(sum(map(len, self.sources))) if index is None else index
        self.is_finite = is_finite
        self._ends: np.ndarray | None = None
        self._tensor: Tensor | None = None
        self._version = 0
        self._part_of: tuple[Tensor, slice | Tensor] | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.row_shape))

    @property
    def nbytes(self) -> int:
        """Of the tensor that reading gives."""
        return self.shape.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice | Tensor) -> HeldColumn | Tensor:
        """These rows, held as well; of a column that was written to, a tensor."""
        if self.is_written:
            return cast(Tensor, self._tensor)[rows]
        index = self.index[rows if isinstance(rows, slice) else rows.numpy()]
        taken = HeldColumn(self.sources, self.dtype, self.row_shape, index, is_finite=self.is_finite)
        taken._ends = self.ends
        if 2 * len(index) < len(self):
            taken._forget_unused()
        if self._tensor is not None:
            taken._part_of = (self._tensor, rows)
        return taken

    def _forget_unused(self) -> None:
        """Leave out the sources that no row comes from: who keeps a part of a column keeps no more of it alive."""
        owner = np.searchsorted(self.ends, self.index, side="right")
        used, place = np.unique(owner, return_inverse=True)
        rows = self.index - self.starts[owner]
        self.sources, self._ends = tuple(self.sources[number] for number in used.tolist()), None
        self.index = rows + self.starts[place]

    @property
    def ends(self) -> np.ndarray:
        """Where each source ends among the rows of all; counted once for all columns that are made of this one."""
        if self._ends is None:
            self._ends = np.cumsum([len(source) for source in self.sources], dtype=np.int64)
        return self._ends

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([np.zeros(1, dtype=np.int64), self.ends[:-1]])

    @staticmethod
    def join(columns: Sequence[HeldColumn | Tensor]) -> HeldColumn:
        """The rows of all, in order."""
        sources: list[Source] = []
        index: list[np.ndarray] = []
        start = 0
        for column in columns:
            if isinstance(column, HeldColumn) and not column.is_written:
                own, rows = column.sources, column.index
            else:
                tensor = column.tensor() if isinstance(column, HeldColumn) else column
                own, rows = (tensor.detach(),), np.arange(len(tensor))
            sources += own
            index.append(start + rows)
            start += sum(map(len, own))
        is_finite = all(isinstance(column, HeldColumn) and column.is_finite for column in columns)
        first = columns[0]
        return HeldColumn(sources, first.dtype, tuple(first.shape[1:]), np.concatenate(index), is_finite=is_finite)

    @property
    def is_written(self) -> bool:
        """Whether somebody read the column and then changed it in place: it is then what it is here."""
        tensor = self._tensor
        return tensor is not None and not tensor.is_inference() and tensor._version != self._version

    def is_same_as(self, other: HeldColumn) -> bool:
        """Whether both are known to have the same rows, without reading any."""
        return (
            not (self.is_written or other.is_written)
            and len(self.sources) == len(other.sources)
            and all(mine is theirs for mine, theirs in zip(self.sources, other.sources, strict=True))
            and np.array_equal(self.index, other.index)
        )

    def tensor(self) -> Tensor:
        """The column; it is fetched the first time."""
        fetch_all([self])
        return cast(Tensor, self._tensor)

    def clone(self) -> Tensor:
        """A tensor that shares nothing."""
        return self.tensor().clone()

    def __reduce__(self) -> tuple[object, ...]:
        """Sources that no row comes from are left out, and of those that are here the other rows."""
        sources: list[object] = []
        index = np.empty(len(self), dtype=np.int64)
        start = 0
        for source, places, rows in self._by_source():
            if isinstance(source, StoredRows):
                sent: object = source
                count = len(source)
            else:
                chosen, rows = np.unique(rows, return_inverse=True)
                source = rows_of(source, chosen)
                sent = Sent(source) if isinstance(source, Tensor) else source
                count = len(chosen)
            sources.append(sent)
            index[places] = start + rows
            start += count
        is_whole = np.array_equal(index, np.arange(start))
        sent_index = None if is_whole else index.astype(np.int32 if start < 2**31 else np.int64)
        return _received_column, (sources, self.dtype, self.row_shape, sent_index, self.is_finite)

    def _by_source(self) -> Iterator[tuple[Source, np.ndarray, np.ndarray]]:
        """Each source that rows come from: where these are in the column, and which rows of it they are."""
        owner = np.searchsorted(self.ends, self.index, side="right")
        order, starts = np.argsort(owner, kind="stable"), self.starts
        numbers, firsts = np.unique(owner[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=bool(len(numbers))):
            yield self.sources[number], places, self.index[places] - starts[number]

    def _fill(self, fetched: Mapping[type[StoredRows], Iterator[Tensor]]) -> None:
        """Put the tensor together; `fetched` has next what its stored sources gave."""
        if self._part_of is not None:
            whole, chosen = self._part_of
            self._keep(whole[chosen])
            return
        parts = []
        for source, places, rows in self._by_source():
            part = next(fetched[type(source)]) if isinstance(source, StoredRows) else rows_of(source, rows)
            parts.append((places, part))
        tensors = [part if isinstance(part, Tensor) else part.unpack() for _, part in parts]
        if len(parts) == 1:
            self._keep(tensors[0])
        elif parts and all(np.array_equal(places, np.arange(places[0], places[-1] + 1)) for places, _ in parts):
            in_order = sorted(range(len(parts)), key=lambda part: int(parts[part][0][0]))
            self._keep(cat([tensors[part] for part in in_order]))
        else:
            tensor = uninitialised(self.shape, self.dtype)
            for (places, _), part in zip(parts, tensors, strict=True):
                tensor[torch.from_numpy(places)] = part
            self._keep(tensor)

    def _keep(self, tensor: Tensor) -> None:
        self._tensor, self._part_of = tensor, None
        self._version = 0 if tensor.is_inference() else tensor._version


def fetch_all(columns: Iterable[HeldColumn]) -> None:
    """Have the tensors of all these columns here, fetched together."""
    unread = [column for column in columns if column._tensor is None]
    wanted: dict[type[StoredRows], list[tuple[StoredRows, np.ndarray]]] = {}
    for column in unread:
        for source, _, rows in column._by_source() if column._part_of is None else ():
            if isinstance(source, StoredRows):
                wanted.setdefault(type(source), []).append((source, rows))
    fetched = {kind: iter(kind.fetch(stored)) for kind, stored in wanted.items()}
    for column in unread:
        column._fill(fetched)


def rows_of(source: Tensor | Stretches, rows: np.ndarray) -> Tensor | Stretches:
    """These rows; the source itself, or a view of it, where they are consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and np.array_equal(rows, np.arange(rows[0], rows[-1] + 1)):
        if len(rows) == len(source):
            return source
        if isinstance(source, Tensor):
            return source[int(rows[0]) : int(rows[-1]) + 1]
    return source.take(rows) if isinstance(source, Stretches) else source[torch.from_numpy(rows)]


def _received_column(
    sources: list[Source],
    dtype: torch.dtype,
    row_shape: tuple[int, ...],
    index: np.ndarray | None,
    is_finite: bool,
) -> HeldColumn:
    return HeldColumn(sources, dtype, row_shape, None if index is None else index.astype(np.int64), is_finite=is_finite)


class _Entries(dict[str, Any]):
    """The entries of a TensorDict; reading one that is held gives its tensor.

    `__iter__` is what makes `dict(entries)` and `{**entries}` ask `__getitem__`.
    """

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value.tensor() if isinstance(value, HeldColumn) else value

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (this is that method)

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        return value.tensor() if isinstance(value, HeldColumn) else value

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        return name, value.tensor() if isinstance(value, HeldColumn) else value

    def as_held(self) -> dict[str, Tensor | HeldColumn]:
        return dict(super().items())


def tensordict_of(
    columns: Mapping[str, object], batch_size: tuple[int, ...], device: torch.device | str | None = None
) -> TensorDict:
    """A TensorDict of these columns, held ones included."""
    from tensordict import TensorDict

    if not any(isinstance(column, HeldColumn) for column in columns.values()):
        return TensorDict(dict(columns), batch_size=batch_size, device=device)
    batch = TensorDict({}, batch_size=batch_size, device=device)
    batch._tensordict = _Entries(columns)  # its only private name; tried with tensordict 0.15.3
    return batch


def columns_of_tensordict(batch: TensorDict | None) -> dict[str, Any]:
    """Its columns by name, held ones as they are."""
    if batch is None:
        return {}
    entries = getattr(batch, "_tensordict", None)
    return entries.as_held() if isinstance(entries, _Entries) else dict(batch.items())
