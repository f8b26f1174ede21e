"""What of a batch need not travel: columns that stay where they were made, and those that take few bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.protocol.batch import DataProto
from paceline.protocol.held import HeldColumn, StoredRows
from paceline.protocol.stretches import pack, repeated_rows

SMALLEST_PACKED_BYTES = 1000
ANSWER_SHARE = 1 / 16
"""A column of an answer travels packed when it takes at most this share of its bytes; else it may stay."""
ARGUMENT_SHARE = 1 / 2
"""A column that the driver sends has to travel, so that half is a gain."""
BYTES_APART = 100_000
"""Rows that are stored together: whoever needs one of them, on another node, fetches all."""


def left_behind(answer: DataProto, keep: Callable[[list[Tensor]], Sequence[StoredRows]], min_bytes: int) -> DataProto:
    """An answer without its large columns: `keep` stores their pieces, of whole rows, where they are.

    Small ones go along, and those that are a few stretches a row go packed.
    """

    def leave(column: Any) -> Any:
        if _stays_as_it_is(column) or column.nbytes < min(min_bytes, SMALLEST_PACKED_BYTES):
            return column
        here = column.detach().cpu()
        stretches = pack(here, ANSWER_SHARE)
        if stretches is None and here.nbytes < min_bytes:
            return column
        rows = max(1, BYTES_APART * len(here) // here.nbytes)
        sources = keep(list(here.split(rows))) if stretches is None else [stretches]
        return HeldColumn(sources, here.dtype, tuple(here.shape[1:]), is_finite=_is_finite(column))

    return answer.with_columns(leave)


def _stays_as_it_is(column: Any) -> bool:
    return isinstance(column, HeldColumn) or not column.numel() or column.layout != torch.strided


def _is_finite(column: Tensor) -> bool:
    if not column.is_floating_point():
        return True
    return column.element_size() > 1 and bool(torch.isfinite(column).all())  # torch can't say it of float8


def packed(data: DataProto) -> DataProto:
    """A batch to send, with the columns packed that take fewer bytes so; rows that repeat the one before go once."""

    def smaller(column: Any) -> Any:
        if _stays_as_it_is(column) or column.nbytes < SMALLEST_PACKED_BYTES:
            return column
        sources: list[Any] = [column.detach()]
        if (index := repeated_rows(column)) is not None:
            firsts = [0, *((index[1:] != index[:-1]).nonzero()[0] + 1).tolist()]
            sources = [column.detach()[firsts]]
        stretches = pack(sources[0], ARGUMENT_SHARE)
        if stretches is None and index is None:
            return column
        return HeldColumn(sources if stretches is None else [stretches], column.dtype, tuple(column.shape[1:]), index)

    return data.with_columns(smaller)
