"""The batch that every phase reads and writes."""

from __future__ import annotations

import copy
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import DataError
from paceline.protocol import disk
from paceline.protocol.allocation import cat
from paceline.protocol.columns import (
    Rows,
    as_column,
    brief_shapes,
    check_columns,
    chunk_bounds,
    gather_meta,
    merge,
    pick,
    readable_bytes,
    require,
    require_same_columns,
    row_numbers,
    split_tensordict,
    tensordict_of_all,
    without,
)
from paceline.protocol.held import HeldColumn, columns_of_tensordict, fetch_all, tensordict_of
from paceline.protocol.transport import Sent, with_tensors_sent

if TYPE_CHECKING:
    from tensordict import TensorDict


Tensors: TypeAlias = Any
"""A TensorDict, or None in a batch without tensors. Types can't say which, and most code knows."""


class DataProtoConfig:
    """Names that mean something in every batch."""

    auto_padding_key = "_paceline_auto_padding"
    """The key of `meta_info` that `auto_padding=True` sets: `chunk` then takes rows that do not divide."""


@dataclass
class DataProtoItem:
    """One row of a `DataProto`: tensors without the batch dimension, the cells of the other columns, the meta info."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(eq=False, repr=False)
class DataProto:
    """Named columns of equal length.

    Subclasses stay: every method gives the class that it was called on, with the fields that a `@dataclass` adds.
    `union`, `pop`, `rename`, `reorder` and `to` change this object (never a tensor's memory, never the TensorDict it
    was made from) and, but for `pop`, return it. Everything else returns a new object.
    """

    batch: Tensors = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self._check()

    def _check(self) -> None:
        """Both column dictionaries are open to users, so what they hold is checked again before it is used."""
        check_columns(self.batch, self.non_tensor_batch)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[object]] | None = None,
        meta_info: Mapping[str, object] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Hold the given columns, without a copy. A list or tuple becomes a column of objects, one cell per element.

        With `auto_padding`, `chunk` takes any number of pieces. Calls on worker groups pad every batch.
        """
        columns = dict(tensors or {})
        for name, tensor in columns.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor column {name!r} is a {type(tensor).__name__}, not a tensor.")
        sizes = {tuple(tensor.shape[:1]) for tensor in columns.values()}
        if () in sizes or len(sizes) > 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in columns.items()}
            raise DataError(f"columns of a batch must have the same number of rows; found shapes {shapes}.")
        batch = tensordict_of(columns, sizes.pop()) if columns else None
        arrays = {name: as_column(name, values) for name, values in (non_tensors or {}).items()}
        padding = {DataProtoConfig.auto_padding_key: True} if auto_padding else {}
        return cls(batch, arrays, {**(meta_info or {}), **padding})

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, object] | None = None, auto_padding: bool = False
    ) -> Self:
        """Like `from_dict`, with tensors and other columns in one dictionary, as a collate function gives them."""
        tensors = {name: values for name, values in data.items() if isinstance(values, Tensor)}
        others = {name: values for name, values in data.items() if not isinstance(values, Tensor)}
        return cls.from_dict(tensors, others, meta_info, auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, object] | None = None) -> Self:
        """Hold this TensorDict, which must have one batch dimension.

        Its `NonTensorStack`s become columns of objects, its `NonTensorData` meta info; without any, it is held itself.
        """
        batch, arrays, found = split_tensordict(tensor_dict)
        return cls(batch, arrays, merge([meta_info or {}, found], "meta info key"))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of everything, without a copy of a tensor: the way back of `from_tensordict`.

        Other columns become `NonTensorStack`s of their cells, and come back as columns of objects.
        """
        self._check()
        device = None if self.batch is None else self.batch.device
        return tensordict_of_all(self._tensors(), self.non_tensor_batch, self.meta_info, len(self), device)

    def __len__(self) -> int:
        """The number of rows; 0 when there is no column at all."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for array in self.non_tensor_batch.values():
            return len(array)
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors and of numpy columns; of an object column nothing, its cells may be shared."""
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values() if array.dtype != object)
        return arrays + sum(column.nbytes for column in self._columns().values())

    def __repr__(self) -> str:
        parts = [f"{len(self)} rows, {readable_bytes(self.nbytes)}"]
        parts += brief_shapes(self._columns()) + brief_shapes(self.non_tensor_batch)
        parts += [f"meta {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return f"{type(self).__name__}({' | '.join(parts)})"

    def _columns(self) -> dict[str, Tensor | HeldColumn]:
        """The tensor columns, those that lie elsewhere as they are held."""
        return columns_of_tensordict(self.batch)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensor columns, fetched."""
        columns = self._columns()
        fetch_all(column for column in columns.values() if isinstance(column, HeldColumn))
        return {name: c.tensor() if isinstance(c, HeldColumn) else c for name, c in columns.items()}

    def fetched(self) -> Self:
        """This batch with all of its columns in this process; itself, if it has them."""
        if not any(isinstance(column, HeldColumn) for column in self._columns().values()):
            return self
        return replace(self, batch=self._batch_of(self._tensors(), len(self)))

    def with_columns(self, change: Callable[[Any], Any]) -> Self:
        """The same with what `change` makes of each tensor column, or of what is held of it; fetches nothing."""
        return self._derive(len(self), change, lambda array: array)

    def row_shape(self, name: str) -> tuple[int, ...]:
        """The shape of one row of a tensor column; fetches nothing."""
        require([name], self._columns(), "tensor column")
        return tuple(self._columns()[name].shape[1:])

    def is_known_finite(self, name: str) -> bool:
        """Whether the numbers of a tensor column are known to be finite; fetches nothing."""
        column = self._columns()[name]
        return isinstance(column, HeldColumn) and column.is_finite and not column.is_written

    def _has_no_columns(self) -> bool:
        return self.batch is None and not self.non_tensor_batch

    @overload
    def __getitem__(self, rows: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, rows: slice | Rows) -> Self: ...
    def __getitem__(self, rows: int | np.integer | slice | Rows) -> DataProtoItem | Self:
        """An int gives a `DataProtoItem`, a slice a view, and row numbers or a mask of bools a copy."""
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
            return self._item(operator.index(rows))
        return self._take(row_numbers(rows, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows `start:end:step`: a view, but for a negative step, which torch can't express as one."""
        bounds = slice(start, end, step)
        selected = range(len(self))[bounds]
        if selected.step < 0:
            return self._take(torch.tensor(selected, dtype=torch.int64))
        return self._derive(len(selected), lambda tensor: tensor[bounds], lambda array: array[bounds])

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` equal, consecutive views. The rows must divide: see `pad_dataproto_to_divisor`.

        With `auto_padding` they need not: the first views then have a row more than the others.
        """
        bounds = chunk_bounds(len(self), chunks, equal=not self.is_padding_enabled())
        return [self.slice(start, end) for start, end in itertools.pairwise(bounds)]

    def is_padding_enabled(self) -> bool:
        """Whether the batch was made with `auto_padding`."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def split(self, split_size: int) -> list[Self]:
        """Consecutive views of `split_size` rows; the last may be shorter. An empty batch gives an empty list."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a batch with {len(self)} rows.")
        tensors = {name: tensor[row] for name, tensor in self._tensors().items()}
        batch = None if self.batch is None else tensordict_of(tensors, (), self.batch.device)
        cells = {name: array[row] for name, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, cells, dict(self.meta_info))

    def repeat(self, repeat_times: int, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: interleaved a a b b, else a b a b."""
        if repeat_times < 1:
            raise ValueError(f"repeat_times is {repeat_times}; it must be at least 1.")
        numbers = torch.arange(len(self))
        numbers = numbers.repeat_interleave(repeat_times) if interleave else numbers.repeat(repeat_times)
        return self._take(numbers)

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Row i `repeat_times[i]` times, the copies of a row together."""
        counts = torch.as_tensor(repeat_times)
        if counts.ndim != 1 or counts.is_floating_point() or len(counts) != len(self) or (counts < 0).any():
            raise DataError(
                f"sample_level_repeat needs one count of 0 or more for each of the {len(self)} rows; "
                f"got {counts.tolist()}."
            )
        return self._take(torch.arange(len(self)).repeat_interleave(counts.cpu().long()))

    def select_idxs(self, idxs: Rows) -> Self:
        """A copy of the rows with these numbers, or of those that a mask of bools marks: `data[idxs]`."""
        return self._take(row_numbers(idxs, len(self)))

    def clone(self) -> Self:
        """A copy that shares nothing: for whoever wants to write into columns that it received."""
        clone = self._derive(len(self), lambda column: column.clone(), copy.deepcopy)
        return replace(clone, meta_info=copy.deepcopy(self.meta_info), **copy.deepcopy(self._added_fields()))

    def _added_fields(self) -> dict[str, Any]:
        """The fields of a subclass."""
        return {one.name: getattr(self, one.name) for one in fields(self)[len(fields(DataProto)) :]}

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, object] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches (copies) of `mini_batch_size` rows, `epochs` times over; the rows must divide.

        `dataloader_kwargs` go to torch's DataLoader: `{"shuffle": True}` draws a new order per epoch, from `seed`, or
        from the global random state without one. Without shuffling the random state is left alone.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataError(
                f"make_iterator was asked for mini-batches of {mini_batch_size}, but the batch has {len(self)} rows; "
                "use a size that divides them, or pad_dataproto_to_divisor."
            )
        options: dict[str, Any] = dict(dataloader_kwargs or {})
        if seed is not None or not options.get("shuffle"):
            # A DataLoader draws from its generator even when it does not shuffle.
            options["generator"] = torch.Generator().manual_seed(0 if seed is None else seed)
        if not len(self):
            return iter(())
        numbers: Any = range(len(self))
        loader = DataLoader(numbers, batch_size=mini_batch_size, collate_fn=self.__getitem__, **options)
        return itertools.chain.from_iterable(itertools.repeat(loader, epochs))

    @classmethod
    def concat(cls, data: Sequence[DataProto]) -> Self:
        """The rows of all, in order: a copy, or a view when only one of them has rows.

        All must have the same columns with the same dtypes and row shapes; batches without any column only give their
        meta info. Meta info is joined as by `union`, except `metrics`: dictionaries become one of lists. Batches of one
        subclass give that, and its added fields are the first batch's.
        """
        if not data:
            raise ValueError("DataProto.concat got an empty list; give it at least one batch.")
        for one in data:
            if not isinstance(one, DataProto):
                raise TypeError(f"DataProto.concat got a {type(one).__name__}; it joins DataProto only.")
            one._check()
        meta_info = gather_meta([one.meta_info for one in data])
        parts = [one for one in data if not one._has_no_columns()] or data[:1]
        for position, part in enumerate(parts[1:], 1):
            require_same_columns(parts[0], part, position)
        parts = [part for part in parts if len(part)] or parts[:1]
        first = parts[0]
        columns, arrays = first._columns(), dict(first.non_tensor_batch)
        if len(parts) > 1:
            each = [part._columns() for part in parts]
            columns = {name: _joined([own[name] for own in each]) for name in columns}
            arrays = {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in arrays}
        batch = first._batch_of(columns, sum(map(len, parts)))
        if {type(one) for one in data} == {type(first)} and isinstance(first, cls):
            return replace(first, batch=batch, non_tensor_batch=arrays, meta_info=meta_info)
        return cls(batch, arrays, meta_info)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """A view of the named columns and meta info, or with `deepcopy` a copy; None means all."""
        tensors = pick(self._columns(), batch_keys, "tensor column")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column")
        meta_info = pick(self.meta_info, meta_info_keys, "meta info key")
        batch = self._batch_of(tensors, len(self))
        selected = replace(self, batch=batch, non_tensor_batch=arrays, meta_info=meta_info)
        return selected.clone() if deepcopy else selected

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Move the named columns and meta info out of this batch, into a new one; None means none."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        rest = without(self._columns(), popped._columns())
        self.batch = self._batch_of(rest, len(self))
        self.non_tensor_batch = without(self.non_tensor_batch, popped.non_tensor_batch)
        self.meta_info = without(self.meta_info, popped.meta_info)
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename tensor or non-tensor columns, all at once (so two may swap their names); returns this batch."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        tensors = self._columns()
        names = [*tensors, *self.non_tensor_batch]
        if len(old) != len(new) or len(set(old)) != len(old):
            raise ValueError(f"rename needs one new name for each of {old}, each named once; it got {new}.")
        require(old, names, "column")
        renamed = dict(zip(old, new, strict=True))
        result = [renamed.get(name, name) for name in names]
        if len(set(result)) != len(result):
            taken = sorted({name for name in result if result.count(name) > 1})
            raise DataError(f"renaming {old} to {new} would give two columns the name {', '.join(map(repr, taken))}.")
        self.batch = self._batch_of({renamed.get(k, k): v for k, v in tensors.items()}, len(self))
        self.non_tensor_batch = {renamed.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """Add the columns and meta info of `other`, without a copy; returns this batch.

        What both have must be equal (NaN equals NaN); this batch's stays. A conflict is an error that names the key and
        leaves this batch as it was.
        """
        self._check()
        other._check()
        if len(self) != len(other) and not self._has_no_columns() and not other._has_no_columns():
            raise DataError(f"union of batches with {len(self)} and {len(other)} rows; they must have the same number.")
        tensors = merge([self._columns(), other._columns()], "tensor column")
        arrays = merge([self.non_tensor_batch, other.non_tensor_batch], "non-tensor column")
        meta_info = merge([self.meta_info, other.meta_info], "meta info key")
        either = self.batch if self.batch is not None else other.batch
        rows = len(other) if self._has_no_columns() else len(self)
        batch = None if either is None else tensordict_of(tensors, (rows,), either.device)
        joined = DataProto(batch, arrays, meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def reorder(self, indices: Rows) -> Self:
        """Put row `indices[i]`, a permutation, at place i (a copy of every column); returns this batch."""
        numbers = row_numbers(indices, len(self))
        if not torch.equal(numbers.sort().values, torch.arange(len(self))):
            raise DataError(
                f"reorder needs each of the {len(self)} rows exactly once; it got {numbers.tolist()}. "
                "Use data[indices] to choose rows."
            )
        moved = self._take(numbers)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors (those already there are not copied); returns this batch."""
        if self.batch is not None:
            tensors = {name: tensor.to(device) for name, tensor in self._tensors().items()}
            self.batch = tensordict_of(tensors, (len(self),), device)
        return self

    def _batch_of(self, tensors: Mapping[str, object], rows: int) -> Tensors:
        """A TensorDict like this one's: it keeps the device, and stays when its last column goes."""
        return None if self.batch is None else tensordict_of(tensors, (rows,), self.batch.device)

    def _derive(self, rows: int, of_tensor: Callable[[Any], Any], of_array: Callable[[np.ndarray], np.ndarray]) -> Self:
        self._check()
        tensors = {name: of_tensor(column) for name, column in self._columns().items()}
        arrays = {name: of_array(array) for name, array in self.non_tensor_batch.items()}
        batch = self._batch_of(tensors, rows)
        return replace(self, batch=batch, non_tensor_batch=arrays, meta_info=dict(self.meta_info))

    def _take(self, numbers: Tensor) -> Self:
        rows = numbers.numpy()
        return self._derive(len(rows), lambda tensor: tensor[numbers.to(tensor.device)], lambda array: array[rows])

    def __reduce__(self) -> tuple[object, ...]:
        self._check()
        tensors = None if self.batch is None else {name: _sent(column) for name, column in self._columns().items()}
        arrays = {
            name: array if array.dtype == object else np.ascontiguousarray(array)
            for name, array in self.non_tensor_batch.items()
        }
        sent = (tensors, len(self), arrays, with_tensors_sent(self.meta_info))
        return _received, sent if type(self) is DataProto else (*sent, type(self), self._added_fields())

    def __copy__(self) -> Self:
        return self.select()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.clone()

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, complete or not at all.

        Object columns and meta info may hold None, bool, int, float, str, numpy scalars, arrays, tensors, and lists,
        tuples and dicts of these; anything else is an error that names the place. Tensors come back on the CPU.
        """
        content = {
            "rows": None if self.batch is None else len(self),
            "tensors": self._tensors(),
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        disk.write(path, content)

    @classmethod
    def load_from_disk(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save_to_disk` wrote. No code in the file is ever run."""
        content = disk.read(path)
        batch = None if content["rows"] is None else tensordict_of(content["tensors"], (content["rows"],))
        return cls(batch, content["non_tensors"], content["meta_info"])


def _joined(columns: list[Any]) -> Tensor | HeldColumn:
    return HeldColumn.join(columns) if any(isinstance(column, HeldColumn) for column in columns) else cat(columns)


def _sent(column: Tensor | HeldColumn) -> Sent | HeldColumn:
    if isinstance(column, HeldColumn):
        return Sent(column.tensor()) if column.is_written else column
    return Sent(column)


def _received(
    tensors: dict[str, Tensor] | None,
    rows: int,
    arrays: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    cls: type[DataProto] = DataProto,
    added_fields: Mapping[str, Any] | None = None,
) -> DataProto:
    batch = None if tensors is None else tensordict_of(tensors, (rows,))
    return cls(batch, arrays, meta_info, **(added_fields or {}))
