"""Rows that fill a batch up so that their number divides."""

from __future__ import annotations

from typing import TypeVar

import torch

from paceline.errors import DataError
from paceline.protocol.batch import DataProto

_Batch = TypeVar("_Batch", bound=DataProto)


def pad_dataproto_to_divisor(data: _Batch, size_divisor: int) -> tuple[_Batch, int]:
    """Append rows, repeated from the start, until `size_divisor` divides their number; also gives how many.

    Nothing to append (an empty batch too): `data` itself. Otherwise a copy.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor is {size_divisor}; it must be at least 1.")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data[torch.arange(len(data) + pad_size) % len(data)], pad_size


def unpad_dataproto(data: _Batch, pad_size: int) -> _Batch:
    """A view without the last `pad_size` rows; `data` itself when there are none to remove."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"can't remove {pad_size} rows of padding from a batch with {len(data)} rows.")
    return data.slice(0, len(data) - pad_size) if pad_size else data
