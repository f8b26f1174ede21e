"""What a dataset is to the preparation: which files, which columns, and how one record becomes one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from paceline.text import shorten

Record = Mapping[str, object]
"""One object of an original file."""
Row = dict[str, Any]
"""The columns of a prepared row."""
Convert = Callable[[Record, str], Row]
"""`convert(record, split)`: the row's columns, but for `data_source` and the `split` and `index` of `extra_info`."""

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""A chat."""


class MalformedRow(Exception):  # noqa: N818 - names what is wrong with the data; never leaves the preparation
    """A record that is not what its dataset promises. `reason` is short, the same for all rows with this fault."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[MalformedRow], tuple[str, str]]:
        return (type(self), (self.reason, self.detail))


class UnusableRow(Exception):  # noqa: N818
    """A record that is as it should be, but of no use: always left out, and counted under this reason."""


@dataclass(frozen=True)
class Source:
    """A public dataset, for one kind of training."""

    name: str
    data_sources: tuple[str, ...]
    """Names by which scorers know it; rows carry the first."""
    schema: pa.Schema
    """Columns of the prepared files."""
    convert: Convert
    hub_id: str
    preferred: tuple[str, ...]
    """Patterns of paths in the dataset's folder. Where some files match, the others hold the same rows again."""
    ignored: tuple[str, ...] = ()
    """Patterns of files that hold something else."""

    @property
    def data_source(self) -> str:
        return self.data_sources[0]

    def row(self, record: Record, split: str, index: int) -> Row:
        """The prepared row of a record, which is number `index` of its split."""
        columns = self.convert(record, split)
        extra = {"split": split, "index": index, **columns.pop("extra_info", {})}
        return {"data_source": self.data_source, **columns, "extra_info": extra}


def rl_schema(**extra_info: pa.DataType) -> pa.Schema:
    """Columns of rows for RL; `extra_info` are the fields that the dataset adds to `split` and `index`."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", extra_info_type(**extra_info)),
        ]
    )


def extra_info_type(**fields: pa.DataType) -> pa.DataType:
    """The type of the `extra_info` column."""
    return pa.struct([("split", pa.string()), ("index", pa.int64()), *fields.items()])


def chat(content: str) -> list[dict[str, str]]:
    """A prompt of one message."""
    return [{"role": "user", "content": content}]


def required(record: Record, name: str) -> object:
    """A field that must be there."""
    value = record.get(name)
    if value is None:
        have = ", ".join(map(str, record)) or "none"
        raise MalformedRow(f"no field {name!r}", "it is null" if name in record else f"the row has {have}")
    return value


def text_field(record: Record, name: str, *, may_be_empty: bool = False) -> str:
    """A field that holds text; a MalformedRow if it is missing, is not text, or is empty (unless it may be)."""
    return checked_text(required(record, name), name, may_be_empty=may_be_empty)


def optional_text(record: Record, name: str, *, may_be_empty: bool = False) -> str | None:
    """The same for a field that may be missing."""
    value = record.get(name)
    return None if value is None else checked_text(value, name, may_be_empty=may_be_empty)


def checked_text(value: object, name: str, *, may_be_empty: bool = False) -> str:
    """`value` if it is text that can be written to a file."""
    if not isinstance(value, str):
        raise MalformedRow(f"{name!r} is not text", f"it is {shorten(repr(value))}")
    if not value.strip() and not may_be_empty:
        raise MalformedRow(f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON's \\ud800 can be read, but not written
        raise MalformedRow(f"{name!r} is not valid Unicode", str(error)) from None
    return value
