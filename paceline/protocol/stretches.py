"""Columns whose rows are a few stretches, such as masks, places and scores at one token, in few bytes.

A row is its first number and the differences between neighbours; equal differences in a row are one stretch. Numbers
are taken by their bits, so what comes back is the same to the last one, NaN and -0.0 included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.protocol.transport import integers_of

_SAMPLED_ROWS = 4
_SMALLEST_WIDTH = 8


@dataclass(frozen=True, eq=False)
class Stretches:
    """The rows of a column (rows, width).

    >>> packed = pack(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]), largest_share=1.0)
    >>> packed.steps.tolist(), packed.lengths.tolist()
    ([0, 1, 0], [4, 1, 2])
    """

    dtype: torch.dtype
    width: int
    first: np.ndarray
    """The bits of each row's first number."""
    counts: np.ndarray
    """The number of stretches of each row."""
    steps: np.ndarray
    """Of each stretch of all rows, one after another: the difference between neighbours."""
    lengths: np.ndarray
    """And how often it comes."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.first, self.counts, self.steps, self.lengths))

    def take(self, rows: np.ndarray) -> Stretches:
        """The rows with these numbers."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        counts = self.counts[rows]
        # Places in steps and lengths: from each row's first stretch on, as many as it has.
        shifts = (ends - self.counts)[rows] - (np.cumsum(counts, dtype=np.int64) - counts)
        places = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
        return replace(
            self, first=self.first[rows], counts=counts, steps=self.steps[places], lengths=self.lengths[places]
        )

    def unpack(self) -> Tensor:
        """The column."""
        bits = np.empty((len(self), self.width), dtype=self.first.dtype)
        bits[:, 0] = self.first
        steps = self.steps.astype(_signed(self.first.dtype)).view(self.first.dtype)
        bits[:, 1:] = np.repeat(steps, self.lengths).reshape(len(self), self.width - 1)
        np.cumsum(bits, axis=1, out=bits, dtype=bits.dtype)  # wraps around, as the differences did
        return torch.from_numpy(bits.view(_signed(bits.dtype))).view(self.dtype)


def pack(tensor: Tensor, largest_share: float) -> Stretches | None:
    """The column as stretches, if that takes at most this share of its bytes, by a few of its rows and by all."""
    if tensor.ndim != 2 or not len(tensor) or tensor.shape[1] < _SMALLEST_WIDTH or tensor.device.type != "cpu":
        return None
    tensor = tensor.detach()
    bits = integers_of(tensor)
    if bits is None:
        return None
    every = -(-len(bits) // _SAMPLED_ROWS)
    if every > 1 and _pack(bits[::every], tensor.dtype, largest_share) is None:
        return None
    return _pack(bits, tensor.dtype, largest_share)


def _pack(bits: np.ndarray, dtype: torch.dtype, largest_share: float) -> Stretches | None:
    steps = bits[:, 1:] - bits[:, :-1]
    is_start = np.ones(steps.shape, dtype=bool)
    np.not_equal(steps[:, 1:], steps[:, :-1], out=is_start[:, 1:])
    counts = is_start.sum(axis=1)
    most = largest_share * bits.nbytes
    if 2 * int(counts.sum()) > most:
        return None
    places = np.flatnonzero(is_start)
    found = steps.ravel()[places].view(_signed(bits.dtype))
    lengths = np.diff(places, append=steps.size)
    packed = Stretches(dtype, bits.shape[1], np.ascontiguousarray(bits[:, 0]), *map(_narrow, (counts, found, lengths)))
    return packed if packed.nbytes <= most else None


def repeated_rows(tensor: Tensor) -> np.ndarray | None:
    """Where rows that stand one behind another are equal: the number of each row's own among those that differ.

    None where fewer than half of them repeat the row before.
    """
    if tensor.ndim != 2 or len(tensor) < 2 or tensor.device.type != "cpu" or not torch.equal(tensor[0], tensor[1]):
        return None
    bits = integers_of(tensor.detach())
    if bits is None:
        return None
    differs = np.ones(len(bits), dtype=bool)
    differs[1:] = (bits[1:] != bits[:-1]).any(axis=1)
    return np.cumsum(differs) - 1 if 2 * differs.sum() <= len(bits) else None


def _signed(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"i{dtype.itemsize}")


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """The same integers in the smallest kind that holds them."""
    if not len(numbers):
        return numbers.astype(np.int8)
    low, high = int(numbers.min()), int(numbers.max())
    kinds = (np.int8, np.int16, np.int32, np.int64)
    return numbers.astype(next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max))
