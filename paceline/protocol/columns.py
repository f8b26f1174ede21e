"""What the columns and the meta info of batches have to fulfil, how they are joined, and their TensorDicts.

The tensordict package is imported where it is first needed: that takes as long as importing torch, and who makes no
batch need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.protocol.held import HeldColumn, columns_of_tensordict, tensordict_of

if TYPE_CHECKING:
    from tensordict import TensorDict

    from paceline.protocol.batch import DataProto

Value = TypeVar("Value")
Rows: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor
"""Which rows: numbers (negative ones count from the end) or one truth value per row."""

GATHERED_META_KEY = "metrics"
"""The key of `meta_info` that differs between ranks by nature: `concat` gathers it."""


def check_columns(batch: TensorDict | None, arrays: Mapping[str, np.ndarray]) -> None:
    """All columns are tensors or arrays, have names of their own, and as many rows as the batch."""
    rows = len(next(iter(arrays.values()), ())) if batch is None else batch_rows(batch)
    tensors = columns_of_tensordict(batch)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | HeldColumn):
            raise TypeError(
                f"tensor column {name!r} is a {type(tensor).__name__}; nested TensorDicts can't be columns, "
                "and other objects go into non_tensor_batch."
            )
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"column {name!r} of non_tensor_batch is a {type(array).__name__}, not a numpy array; "
                "DataProto.from_dict converts lists."
            )
        if array.ndim == 0 or len(array) != rows:
            raise DataError(f"column {name!r} has shape {array.shape}, but the batch has {rows} rows.")
        if name in tensors:
            raise DataError(f"column {name!r} is both in batch and in non_tensor_batch; rename one.")


def batch_rows(batch: TensorDict) -> int:
    """The rows of what should be a TensorDict with one batch dimension."""
    from tensordict.base import TensorDictBase

    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"DataProto.batch is a {type(batch).__name__}, not a TensorDict; use DataProto.from_dict.")
    if len(batch.batch_size) != 1:
        raise DataError(
            f"DataProto has one batch dimension; the TensorDict has batch size {list(batch.batch_size)}. "
            "Make it with batch_size=[rows]."
        )
    return int(batch.batch_size[0])


def row_numbers(rows: object, count: int) -> Tensor:
    """Any way to name rows of `count`, as int64 numbers from 0; a mask must have one truth value per row."""
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
        if len(array) != count:
            raise IndexError(f"a mask of {len(array)} truth values for a batch with {count} rows.")
        array = np.flatnonzero(array)
    outside = array[(array < -count) | (array >= count)]
    if outside.size:
        raise IndexError(f"row {outside[0]} of a batch with {count} rows.")
    numbers = torch.from_numpy(array.astype(np.int64))
    return torch.where(numbers < 0, numbers + count, numbers)


def as_column(name: str, values: np.ndarray | Sequence[object]) -> np.ndarray:
    """Lists are filled in cell by cell: numpy would make a second dimension of lists of equal length."""
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, list | tuple):
        raise TypeError(f"column {name!r} is a {type(values).__name__}; columns are tensors, numpy arrays or lists.")
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def chunk_bounds(rows: int, chunks: int, *, equal: bool) -> list[int]:
    """Where each of `chunks` chunks starts, and the end. If they need not be equal, the first ones have a row more."""
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; it must be at least 1.")
    size, extra = divmod(rows, chunks)
    if extra and equal:
        raise DataError(
            f"{rows} rows can't be divided into {chunks} equal chunks; use pad_dataproto_to_divisor(data, {chunks}) "
            "first, or split(split_size) for unequal pieces."
        )
    return [index * size + min(index, extra) for index in range(chunks + 1)]


def require(wanted: Iterable[str], known: Iterable[str], what: str) -> None:
    missing = [name for name in wanted if name not in set(known)]
    if missing:
        names = ", ".join(map(repr, missing))
        raise DataError(f"no {what} {names}; there are: {', '.join(map(str, known)) or 'none'}.")


def pick(columns: Mapping[str, Value], names: Iterable[str] | None, what: str) -> dict[str, Value]:
    if isinstance(names, str):
        raise TypeError(f"a list of names was expected, not the string {names!r}.")
    wanted = list(columns if names is None else names)
    require(wanted, columns, what)
    return {name: columns[name] for name in wanted}


def without(columns: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    return {name: value for name, value in columns.items() if name not in names}


def require_same_columns(first: DataProto, other: DataProto, position: int) -> None:
    """torch.cat would promote dtypes in silence and report shapes without the column's name."""
    for mine, theirs in (
        (first._columns(), other._columns()),
        (first.non_tensor_batch, other.non_tensor_batch),
    ):
        if set(mine) != set(theirs):
            raise DataError(
                f"concat needs the same columns everywhere; only in part 0: {sorted(set(mine) - set(theirs))}, "
                f"only in part {position}: {sorted(set(theirs) - set(mine))}."
            )
        for name, column in mine.items():
            # numpy strings of other lengths have other dtypes, of the same kind
            kinds = [c.dtype.kind if isinstance(c, np.ndarray) else c.dtype for c in (column, theirs[name])]
            if kinds[0] != kinds[1] or column.shape[1:] != theirs[name].shape[1:]:
                raise DataError(
                    f"concat of column {name!r}: part 0 has {column.dtype} with row shape {tuple(column.shape[1:])}, "
                    f"part {position} has {theirs[name].dtype} with row shape {tuple(theirs[name].shape[1:])}."
                )


def merge(sources: Iterable[Mapping[str, Value]], what: str) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for source in sources:
        for name, value in source.items():
            if name not in merged:
                merged[name] = value
            elif not same(merged[name], value):
                raise DataError(
                    f"{what} {name!r} is on both sides with different content: {brief(merged[name])} and "
                    f"{brief(value)}. Pop or rename one of them first."
                )
    return merged


def gather_meta(metas: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """One meta info of all, with the metrics of every rank.

    Dictionaries of metrics become one, with all values of each name in order. A list adds its elements: what was
    gathered before may be gathered again.
    """
    merged = merge([without(meta, (GATHERED_META_KEY,)) for meta in metas], "meta info key")
    found = [meta[GATHERED_META_KEY] for meta in metas if GATHERED_META_KEY in meta]
    each = [one for some in found for one in _listed(some)]
    dicts = [one for one in each if isinstance(one, Mapping)]
    if found and len(dicts) == len(each):
        gathered: dict[str, list[object]] = {}
        for name, value in (item for one in dicts for item in one.items()):
            gathered.setdefault(name, []).extend(_listed(value))
        merged[GATHERED_META_KEY] = gathered
    elif found:
        merged[GATHERED_META_KEY] = each
    return merged


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def same(a: object, b: object) -> bool:
    """Equal in value, with NaN equal to NaN, through containers, arrays and tensors."""
    if a is b:
        return True
    if isinstance(a, HeldColumn) and isinstance(b, HeldColumn) and a.is_same_as(b):
        return True
    a, b = (value.tensor() if isinstance(value, HeldColumn) else value for value in (a, b))
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
            return all(map(same, a.flat, b.flat))
        return a.dtype.kind == b.dtype.kind and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def brief(value: object) -> str:
    if isinstance(value, Tensor | HeldColumn | np.ndarray):
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def readable_bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def brief_shapes(columns: Mapping[str, Tensor | HeldColumn | np.ndarray]) -> list[str]:
    """`name dtype(shape)` of each."""
    return [
        f"{name} {str(column.dtype).removeprefix('torch.')}({', '.join(map(str, column.shape))})"
        for name, column in columns.items()
    ]


def split_tensordict(tensor_dict: TensorDict) -> tuple[TensorDict, dict[str, np.ndarray], dict[str, Any]]:
    """(the tensors, the non-tensors with a value per row, the non-tensors with one value for all rows)."""
    from tensordict import NonTensorData, NonTensorStack

    rows = batch_rows(tensor_dict)
    arrays: dict[str, np.ndarray] = {}
    whole: dict[str, Any] = {}
    rest: dict[str, object] = {}
    for name, value in tensor_dict.items():
        if isinstance(value, NonTensorStack):
            arrays[name] = as_column(name, value.tolist())
        elif isinstance(value, NonTensorData):
            whole[name] = value.data
        else:
            rest[name] = value
    if not arrays and not whole:
        return tensor_dict, {}, {}
    return tensordict_of(rest, (rows,), tensor_dict.device), arrays, whole


def tensordict_of_all(
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, np.ndarray],
    meta_info: Mapping[str, object],
    rows: int,
    device: torch.device | None,
) -> TensorDict:
    """What `split_tensordict` takes apart."""
    from tensordict import NonTensorData, NonTensorStack

    if clash := sorted({*tensors, *arrays} & set(meta_info)):
        raise DataError(f"a TensorDict has one value of a name; these are columns and meta info: {clash}. Rename one.")
    stacks = {name: NonTensorStack(*map(NonTensorData, array)) for name, array in arrays.items()}
    whole = {name: NonTensorData(value, batch_size=(rows,)) for name, value in meta_info.items()}
    return tensordict_of({**tensors, **stacks, **whole}, (rows,), device)
