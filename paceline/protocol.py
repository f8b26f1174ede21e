"""The batch that every phase reads and writes, and the promise of one that is still being computed.

A `DataProto` holds named columns of equal length: tensors in `batch`, numpy arrays (usually of objects) in
`non_tensor_batch`, and in `meta_info` what belongs to the batch as a whole.

>>> data = DataProto.from_dict({"prompts": torch.zeros(4, 3)}, {"uid": ["a", "a", "b", "b"]}, {"temperature": 1.0})
>>> data
DataProto(4 rows, 48 B | prompts float32(4, 3) | uid object(4) | meta temperature)
>>> [len(shard) for shard in data.chunk(2)]
[2, 2]

Pickled, as Ray does to send it, its tensors and numeric arrays are out-of-band buffers, which a reader on the same
machine maps and does not copy. **Received columns are immutable**: torch can't enforce it, and a write in place would
change the batch of every other reader. `clone()` before writing. docs/protocol.md tells views from copies.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]

Rows: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Which rows: numbers (negative ones count from the end) or one truth value per row."""

GATHERED_META_KEY = "metrics"
"""The key of `meta_info` that differs between ranks by nature: `concat` gathers it into a list."""


@dataclass
class DataProtoItem:
    """One row of a `DataProto`: tensors without the batch dimension, the cells of the other columns, the meta info."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(eq=False, repr=False)
class DataProto:
    """Named columns of equal length.

    `union`, `pop`, `rename`, `reorder` and `to` change this object (never a tensor's memory, never the TensorDict it
    was made from) and, but for `pop`, return it. Everything else returns a new object.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Both column dictionaries are open to users, so what they hold is checked again before it is used."""
        if self.batch is not None:
            from tensordict.base import TensorDictBase

            if not isinstance(self.batch, TensorDictBase):
                raise TypeError(
                    f"DataProto.batch is a {type(self.batch).__name__}, not a TensorDict; use DataProto.from_dict."
                )
            if len(self.batch.batch_size) != 1:
                raise DataError(
                    f"DataProto has one batch dimension; the TensorDict has batch size {list(self.batch.batch_size)}. "
                    "Make it with batch_size=[rows]."
                )
        tensors, rows = self._tensors(), len(self)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"tensor column {name!r} is a {type(tensor).__name__}; nested TensorDicts can't be columns, "
                    "and other objects go into non_tensor_batch."
                )
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"column {name!r} of non_tensor_batch is a {type(array).__name__}, not a numpy array; "
                    "DataProto.from_dict converts lists."
                )
            if array.ndim == 0 or len(array) != rows:
                raise DataError(f"column {name!r} has shape {array.shape}, but the batch has {rows} rows.")
            if name in tensors:
                raise DataError(f"column {name!r} is both in batch and in non_tensor_batch; rename one.")

    @staticmethod
    def from_dict(
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Hold the given columns, without a copy. A list or tuple becomes a column of objects, one cell per element."""
        columns = dict(tensors or {})
        for name, tensor in columns.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor column {name!r} is a {type(tensor).__name__}, not a tensor.")
        sizes = {tuple(tensor.shape[:1]) for tensor in columns.values()}
        if () in sizes or len(sizes) > 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in columns.items()}
            raise DataError(f"columns of a batch must have the same number of rows; found shapes {shapes}.")
        batch = _tensordict(columns, sizes.pop()) if columns else None
        arrays = {name: _as_column(name, values) for name, values in (non_tensors or {}).items()}
        return DataProto(batch, arrays, dict(meta_info or {}))

    @staticmethod
    def from_single_dict(data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Like `from_dict`, with tensors and other columns in one dictionary, as a collate function gives them."""
        tensors = {name: values for name, values in data.items() if isinstance(values, Tensor)}
        others = {name: values for name, values in data.items() if not isinstance(values, Tensor)}
        return DataProto.from_dict(tensors, others, meta_info)

    @staticmethod
    def from_tensordict(tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Hold this very TensorDict, which must have one batch dimension."""
        return DataProto(tensor_dict, {}, dict(meta_info or {}))

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
        return arrays + sum(tensor.nbytes for tensor in self._tensors().values())

    def __repr__(self) -> str:
        def shaped(name: str, dtype: Any, shape: Sequence[int]) -> str:
            return f"{name} {str(dtype).removeprefix('torch.')}({', '.join(map(str, shape))})"

        parts = [f"{len(self)} rows, {_readable_bytes(self.nbytes)}"]
        parts += [shaped(name, tensor.dtype, tensor.shape) for name, tensor in self._tensors().items()]
        parts += [shaped(name, array.dtype, array.shape) for name, array in self.non_tensor_batch.items()]
        parts += [f"meta {', '.join(map(str, self.meta_info))}"] if self.meta_info else []
        return f"DataProto({' | '.join(parts)})"

    def _tensors(self) -> dict[str, Tensor]:
        items: Any = () if self.batch is None else self.batch.items()
        return dict(items)

    def _has_no_columns(self) -> bool:
        return self.batch is None and not self.non_tensor_batch

    @overload
    def __getitem__(self, rows: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, rows: slice | Rows) -> DataProto: ...
    def __getitem__(self, rows: int | np.integer | slice | Rows) -> DataProtoItem | DataProto:
        """An int gives a `DataProtoItem`, a slice a view, and row numbers or a mask of bools a copy."""
        if isinstance(rows, slice):
            return self.slice(rows.start, rows.stop, rows.step)
        if isinstance(rows, int | np.integer) and not isinstance(rows, bool):
            return self._item(operator.index(rows))
        return self._take(self._row_numbers(rows))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `start:end:step`: a view, but for a negative step, which torch can't express as one."""
        bounds = slice(start, end, step)
        selected = range(len(self))[bounds]
        if selected.step < 0:
            return self._take(torch.tensor(selected, dtype=torch.int64))
        return self._derive(len(selected), lambda tensor: tensor[bounds], lambda array: array[bounds])

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` equal, consecutive views. The rows must divide: see `pad_dataproto_to_divisor`."""
        starts, size = _chunk_starts(len(self), chunks)
        return [self.slice(start, start + size) for start in starts]

    def split(self, split_size: int) -> list[DataProto]:
        """Consecutive views of `split_size` rows; the last may be shorter. An empty batch gives an empty list."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a batch with {len(self)} rows.")
        tensors = {name: tensor[row] for name, tensor in self._tensors().items()}
        batch = None if self.batch is None else _tensordict(tensors, (), self.batch.device)
        cells = {name: array[row] for name, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, cells, dict(self.meta_info))

    def repeat(self, repeat_times: int, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: interleaved a a b b, else a b a b."""
        if repeat_times < 1:
            raise ValueError(f"repeat_times is {repeat_times}; it must be at least 1.")
        numbers = torch.arange(len(self))
        numbers = numbers.repeat_interleave(repeat_times) if interleave else numbers.repeat(repeat_times)
        return self._take(numbers)

    def clone(self) -> DataProto:
        """A copy that shares nothing: for whoever wants to write into columns that it received."""
        clone = self._derive(len(self), torch.clone, copy.deepcopy)
        clone.meta_info = copy.deepcopy(self.meta_info)
        return clone

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches (copies) of `mini_batch_size` rows, `epochs` times over; the rows must divide.

        `dataloader_kwargs` go to torch's DataLoader: `{"shuffle": True}` draws a new order per epoch, from `seed`, or
        from the global random state without one. Without shuffling the random state is left alone.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise DataError(
                f"make_iterator was asked for mini-batches of {mini_batch_size}, but the batch has {len(self)} rows; "
                "use a size that divides them, or pad_dataproto_to_divisor."
            )
        options = dict(dataloader_kwargs or {})
        if seed is not None or not options.get("shuffle"):
            # A DataLoader draws from its generator even when it does not shuffle.
            options["generator"] = torch.Generator().manual_seed(0 if seed is None else seed)
        if not len(self):
            return iter(())
        numbers: Any = range(len(self))
        loader = DataLoader(numbers, batch_size=mini_batch_size, collate_fn=self.__getitem__, **options)
        return itertools.chain.from_iterable(itertools.repeat(loader, epochs))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all, in order: a copy, or a view when only one of them has rows.

        All must have the same columns with the same dtypes and row shapes; batches without any column only give their
        meta info. Meta info is joined as by `union`, except `metrics`, which is gathered into one list.
        """
        if not data:
            raise ValueError("DataProto.concat got an empty list; give it at least one batch.")
        for one in data:
            if not isinstance(one, DataProto):
                raise TypeError(f"DataProto.concat got a {type(one).__name__}; it joins DataProto only.")
            one._check()
        meta_info = _gather_meta([one.meta_info for one in data])
        parts = [one for one in data if not one._has_no_columns()] or data[:1]
        for position, part in enumerate(parts[1:], 1):
            _require_same_columns(parts[0], part, position)
        parts = [part for part in parts if len(part)] or parts[:1]
        first = parts[0]
        if len(parts) == 1:
            return DataProto(first._batch_of(first._tensors(), len(first)), dict(first.non_tensor_batch), meta_info)
        tensors = {name: _cat([part._tensors()[name] for part in parts]) for name in first._tensors()}
        arrays = {name: np.concatenate([p.non_tensor_batch[name] for p in parts]) for name in first.non_tensor_batch}
        return DataProto(first._batch_of(tensors, sum(map(len, parts))), arrays, meta_info)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """A view of the named columns and meta info; None means all."""
        tensors = _pick(self._tensors(), batch_keys, "tensor column")
        arrays = _pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column")
        meta_info = _pick(self.meta_info, meta_info_keys, "meta info key")
        return DataProto(self._batch_of(tensors, len(self)), arrays, meta_info)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Move the named columns and meta info out of this batch, into a new one; None means none."""
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        rest = {name: tensor for name, tensor in self._tensors().items() if name not in popped._tensors()}
        self.batch = self._batch_of(rest, len(self))
        self.non_tensor_batch = _without(self.non_tensor_batch, popped.non_tensor_batch)
        self.meta_info = _without(self.meta_info, popped.meta_info)
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Rename tensor or non-tensor columns, all at once (so two may swap their names); returns this batch."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        tensors = self._tensors()
        names = [*tensors, *self.non_tensor_batch]
        if len(old) != len(new) or len(set(old)) != len(old):
            raise ValueError(f"rename needs one new name for each of {old}, each named once; it got {new}.")
        _require(old, names, "column")
        renamed = dict(zip(old, new, strict=True))
        result = [renamed.get(name, name) for name in names]
        if len(set(result)) != len(result):
            taken = sorted({name for name in result if result.count(name) > 1})
            raise DataError(f"renaming {old} to {new} would give two columns the name {', '.join(map(repr, taken))}.")
        self.batch = self._batch_of({renamed.get(k, k): v for k, v in tensors.items()}, len(self))
        self.non_tensor_batch = {renamed.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and meta info of `other`, without a copy; returns this batch.

        What both have must be equal (NaN equals NaN); this batch's stays. A conflict is an error that names the key and
        leaves this batch as it was.
        """
        self._check()
        other._check()
        if len(self) != len(other) and not self._has_no_columns() and not other._has_no_columns():
            raise DataError(f"union of batches with {len(self)} and {len(other)} rows; they must have the same number.")
        tensors = _merge([self._tensors(), other._tensors()], "tensor column")
        arrays = _merge([self.non_tensor_batch, other.non_tensor_batch], "non-tensor column")
        meta_info = _merge([self.meta_info, other.meta_info], "meta info key")
        either = self.batch if self.batch is not None else other.batch
        rows = len(other) if self._has_no_columns() else len(self)
        batch = None if either is None else _tensordict(tensors, (rows,), either.device)
        joined = DataProto(batch, arrays, meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def reorder(self, indices: Rows) -> DataProto:
        """Put row `indices[i]`, a permutation, at place i (a copy of every column); returns this batch."""
        numbers = self._row_numbers(indices)
        if not torch.equal(numbers.sort().values, torch.arange(len(self))):
            raise DataError(
                f"reorder needs each of the {len(self)} rows exactly once; it got {numbers.tolist()}. "
                "Use data[indices] to choose rows."
            )
        moved = self._take(numbers)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch
        return self

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors (those already there are not copied); returns this batch."""
        if self.batch is not None:
            tensors = {name: tensor.to(device) for name, tensor in self._tensors().items()}
            self.batch = _tensordict(tensors, (len(self),), device)
        return self

    def _batch_of(self, tensors: dict[str, Tensor], rows: int) -> TensorDict | None:
        """A TensorDict like this one's: it keeps the device, and stays when its last column goes."""
        return None if self.batch is None else _tensordict(tensors, (rows,), self.batch.device)

    def _derive(
        self, rows: int, of_tensor: Callable[[Tensor], Tensor], of_array: Callable[[np.ndarray], np.ndarray]
    ) -> DataProto:
        self._check()
        tensors = {name: of_tensor(tensor) for name, tensor in self._tensors().items()}
        arrays = {name: of_array(array) for name, array in self.non_tensor_batch.items()}
        return DataProto(self._batch_of(tensors, rows), arrays, dict(self.meta_info))

    def _take(self, numbers: Tensor) -> DataProto:
        rows = numbers.numpy()
        return self._derive(len(rows), lambda tensor: tensor[numbers.to(tensor.device)], lambda array: array[rows])

    def _row_numbers(self, rows: Any) -> Tensor:
        """Any way to name rows, as int64 numbers from 0; a mask must have one truth value per row."""
        array = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
        if array.ndim == 1 and not array.size and array.dtype.kind == "f":
            array = array.astype(np.int64)  # what numpy makes of an empty list
        if array.ndim != 1 or array.dtype.kind not in "biu":
            raise TypeError(
                "rows are chosen by an int, a slice, or one dimension of ints or bools; got "
                f"{type(rows).__name__} with shape {array.shape} and dtype {array.dtype}. Columns are in .batch and "
                ".non_tensor_batch."
            )
        if array.dtype.kind == "b":
            if len(array) != len(self):
                raise IndexError(f"a mask of {len(array)} truth values for a batch with {len(self)} rows.")
            array = np.flatnonzero(array)
        outside = array[(array < -len(self)) | (array >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a batch with {len(self)} rows.")
        numbers = torch.from_numpy(array.astype(np.int64))
        return torch.where(numbers < 0, numbers + len(self), numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check()
        tensors = None if self.batch is None else {name: _Sent(tensor) for name, tensor in self._tensors().items()}
        arrays = {
            name: array if array.dtype == object else np.ascontiguousarray(array)
            for name, array in self.non_tensor_batch.items()
        }
        return _received, (tensors, len(self), arrays, _with_tensors_sent(self.meta_info))

    def __copy__(self) -> DataProto:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return self.clone()

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, complete or not at all.

        Object columns and meta info may hold None, bool, int, float, str, numpy scalars, arrays, tensors, and lists,
        tuples and dicts of these; anything else is an error that names the place. Tensors come back on the CPU.
        """
        tensors: dict[str, Tensor] = {}
        content = {
            "rows": None if self.batch is None else len(self),
            "tensors": _pack(self._tensors(), tensors, "batch"),
            "non_tensors": _pack(self.non_tensor_batch, tensors, "non_tensor_batch"),
            "meta_info": _pack(self.meta_info, tensors, "meta_info"),
        }
        tensors[_DISK_JSON] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            save_file(tensors, unfinished, metadata={"format": _DISK_FORMAT})
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load_from_disk(path: str | os.PathLike[str]) -> DataProto:
        """Read what `save_to_disk` wrote. No code in the file is ever run."""
        try:
            with safe_open(path, framework="pt") as file:
                found = (file.metadata() or {}).get("format")
                if found != _DISK_FORMAT:
                    raise DataError(f"{path} is a safetensors file of format {found!r}, not {_DISK_FORMAT!r}.")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise DataError(f"{path} was not written by DataProto.save_to_disk: {error}") from error
        content = json.loads(tensors.pop(_DISK_JSON).numpy().tobytes())
        rows = content["rows"]
        columns = _unpack(content["tensors"], tensors)
        batch = None if rows is None else _tensordict(columns, (rows,))
        return DataProto(batch, _unpack(content["non_tensors"], tensors), _unpack(content["meta_info"], tensors))


def pad_dataproto_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Append rows, repeated from the start, until `divisor` divides their number; also gives how many.

    Nothing to append (an empty batch too): `data` itself. Otherwise a copy.
    """
    if divisor < 1:
        raise ValueError(f"divisor is {divisor}; it must be at least 1.")
    pad_size = -len(data) % divisor
    if pad_size == 0:
        return data, 0
    return data[torch.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """A view without the last `pad_size` rows; `data` itself when there are none to remove."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"can't remove {pad_size} rows of padding from a batch with {len(data)} rows.")
    return data.slice(0, len(data) - pad_size) if pad_size else data


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


def _cat(pieces: list[torch.Tensor]) -> torch.Tensor:
    """torch.cat into memory from numpy, which asks for huge pages where torch does not: faster for large columns."""
    if any(piece.device.type != "cpu" or piece.requires_grad for piece in pieces):
        return torch.cat(pieces)
    first = pieces[0]
    shape = (sum(len(piece) for piece in pieces), *first.shape[1:])
    memory = np.empty(math.prod(shape) * first.element_size(), dtype=np.uint8)
    return torch.cat(pieces, out=torch.from_numpy(memory).view(first.dtype).view(shape))


def _as_column(name: str, values: np.ndarray | Sequence[Any]) -> np.ndarray:
    """Lists are filled in cell by cell: numpy would make a second dimension of lists of equal length."""
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, list | tuple):
        raise TypeError(f"column {name!r} is a {type(values).__name__}; columns are tensors, numpy arrays or lists.")
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def _chunk_starts(rows: int, chunks: int) -> tuple[list[int], int]:
    """Where each of `chunks` equal chunks starts, and their size."""
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; it must be at least 1.")
    if rows % chunks:
        raise DataError(
            f"{rows} rows can't be divided into {chunks} equal chunks; use pad_dataproto_to_divisor(data, {chunks}) "
            "first, or split(split_size) for unequal pieces."
        )
    return [index * (rows // chunks) for index in range(chunks)], rows // chunks


def _require(wanted: Iterable[str], known: Iterable[str], what: str) -> None:
    missing = [name for name in wanted if name not in set(known)]
    if missing:
        names = ", ".join(map(repr, missing))
        raise DataError(f"no {what} {names}; there are: {', '.join(map(str, known)) or 'none'}.")


def _pick(columns: Mapping[str, Any], names: Iterable[str] | None, what: str) -> dict[str, Any]:
    if isinstance(names, str):
        raise TypeError(f"a list of names was expected, not the string {names!r}.")
    wanted = list(columns if names is None else names)
    _require(wanted, columns, what)
    return {name: columns[name] for name in wanted}


def _without(columns: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in names}


def _require_same_columns(first: DataProto, other: DataProto, position: int) -> None:
    """torch.cat would promote dtypes in silence and report shapes without the column's name."""
    for mine, theirs in (
        (first._tensors(), other._tensors()),
        (first.non_tensor_batch, other.non_tensor_batch),
    ):
        if set(mine) != set(theirs):
            raise DataError(
                f"concat needs the same columns everywhere; only in part 0: {sorted(set(mine) - set(theirs))}, "
                f"only in part {position}: {sorted(set(theirs) - set(mine))}."
            )
        for name, column in mine.items():
            # numpy strings of other lengths have other dtypes, of the same kind
            kinds = [c.dtype if isinstance(c, Tensor) else c.dtype.kind for c in (column, theirs[name])]
            if kinds[0] != kinds[1] or column.shape[1:] != theirs[name].shape[1:]:
                raise DataError(
                    f"concat of column {name!r}: part 0 has {column.dtype} with row shape {tuple(column.shape[1:])}, "
                    f"part {position} has {theirs[name].dtype} with row shape {tuple(theirs[name].shape[1:])}."
                )


def _merge(sources: Iterable[Mapping[str, Any]], what: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if name not in merged:
                merged[name] = value
            elif not _same(merged[name], value):
                raise DataError(
                    f"{what} {name!r} is on both sides with different content: {_brief(merged[name])} and "
                    f"{_brief(value)}. Pop or rename one of them first."
                )
    return merged


def _gather_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = _merge([_without(meta, (GATHERED_META_KEY,)) for meta in metas], "meta info key")
    found = [meta[GATHERED_META_KEY] for meta in metas if GATHERED_META_KEY in meta]
    if found:
        merged[GATHERED_META_KEY] = [one for each in found for one in (each if isinstance(each, list) else [each])]
    return merged


def _same(a: Any, b: Any) -> bool:
    """Equal in value, with NaN equal to NaN, through containers, arrays and tensors."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        b = b.to(a.device)
        if torch.equal(a, b):
            return True
        return (a.is_floating_point() or a.is_complex()) and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
            return False
        if a.dtype.kind == "O" and b.dtype.kind == "O":
            return all(map(_same, a.flat, b.flat))
        return a.dtype.kind == b.dtype.kind and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _readable_bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sent:
    """A tensor that pickles as a numpy array over its memory, which protocol 5 moves out of band, and comes back as a
    tensor. It arrives detached and on the CPU; dtypes that numpy lacks (bfloat16, float8) travel as integers."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        if self.tensor.layout != torch.strided:
            raise DataError(f"a tensor of layout {self.tensor.layout} can't be sent; make it dense first.")
        tensor = self.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        try:
            array = tensor.numpy()
        except TypeError:
            array = tensor.view(_INTEGER_OF_SIZE[tensor.element_size()]).numpy()
        return _tensor_over, (array, tensor.dtype)


def _tensor_over(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor over the array's memory, which it keeps alive.

    By DLPack, since `torch.from_numpy` warns about arrays that are read-only, as Ray's are.
    """
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_dlpack(array).view(dtype)


def _with_tensors_sent(value: Any) -> Any:
    """The same containers, with their tensors ready to be pickled."""
    if isinstance(value, Tensor):
        return _Sent(value)
    if type(value) is dict:
        return {key: _with_tensors_sent(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_tensors_sent, value))
    return value


def _tensordict(
    columns: Mapping[str, Any], batch_size: tuple[int, ...], device: torch.device | str | None = None
) -> TensorDict:
    # Here and not at the top: importing it takes as long as importing torch, and who makes no batch need not wait.
    from tensordict import TensorDict

    return TensorDict(dict(columns), batch_size=batch_size, device=device)


def _received(
    tensors: dict[str, Tensor] | None, rows: int, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> DataProto:
    batch = None if tensors is None else _tensordict(tensors, (rows,))
    return DataProto(batch, arrays, meta_info)


_DISK_FORMAT = "paceline.DataProto/1"
_DISK_JSON = "json"


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """JSON for `value`. Tensors and numeric arrays go to `tensors`; what JSON lacks becomes a dict with one "$" key."""

    def store(tensor: Tensor) -> str:
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise DataError(f"{where} has dtype {tensor.dtype} and layout {tensor.layout}, which can't be saved.")
        name = f"{len(tensors)}.{where}"
        # A clone, for views would drag their whole storage along and shared storage is refused.
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": store(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        cells = [_pack(cell, tensors, f"{where}[{row}]") for row, cell in enumerate(value.reshape(-1).tolist())]
        return {"$objects": [value.dtype.str, list(value.shape), cells]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$array": store(torch.tensor(value))}
    if isinstance(value, np.generic) and value.dtype.kind in "biufU" and not isinstance(value, np.longdouble):
        return {"$scalar": [value.dtype.str, value.item()]}
    if type(value) in (list, tuple):
        items = [_pack(item, tensors, f"{where}[{place}]") for place, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is dict:
        items = [[_pack(key, tensors, where), _pack(item, tensors, f"{where}.{key}")] for key, item in value.items()]
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(items) if plain else {"$dict": items}
    raise DataError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which can't be saved; use None, bool, "
        "int, float, str, numpy scalars and arrays, tensors, or lists, tuples and dicts of these."
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str
    content: Any
    tag, content = next(iter(value.items()), ("", None))
    match tag:
        case "$tensor":
            return tensors[content]
        case "$array":
            return tensors[content].numpy()
        case "$objects":
            dtype, shape, cells = content
            return _as_column(tag, [_unpack(cell, tensors) for cell in cells]).astype(dtype).reshape(shape)
        case "$scalar":
            return np.dtype(content[0]).type(content[1])
        case "$tuple":
            return tuple(_unpack(content, tensors))
        case "$dict":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    return {key: _unpack(item, tensors) for key, item in value.items()}
