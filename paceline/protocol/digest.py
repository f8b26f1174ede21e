"""A digest of a tensor's bytes that costs little beside reading them, on whatever device it lies."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

_WORDS_PER_ROW = 4096
_ROWS_AT_ONCE = 256
"""Away from the CPU: products of so many rows are in memory at a time."""


def tensor_digest(tensor: Tensor) -> str:
    """Equal for tensors of the same dtype, shape and bytes, and no others.

    Rows of 8-byte words are summed with fixed odd factors, modulo 2**64; a cryptographic hash takes the sums. So a
    single word that differs always shows, and what lies anywhere has the same digest: integers add up alike everywhere.

    >>> tensor_digest(torch.tensor([1.0, 2.0])) == tensor_digest(torch.tensor([2.0, 1.0]))
    False
    """
    flat = tensor.detach().contiguous().reshape(-1)
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    if not flat.numel():
        return found.hexdigest()
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    num_words = raw.numel() // 8
    words = raw[: num_words * 8].view(torch.int64)
    num_rows = num_words // _WORDS_PER_ROW
    if num_rows:
        rows = words[: num_rows * _WORDS_PER_ROW].view(num_rows, _WORDS_PER_ROW)
        found.update(_sums(rows).cpu().numpy().tobytes())
    found.update(raw[num_rows * _WORDS_PER_ROW * 8 :].cpu().numpy().tobytes())
    return found.hexdigest()


def _sums(rows: Tensor) -> Tensor:
    factors = _factors(rows.device)
    if rows.device.type == "cpu":
        return rows @ factors
    return torch.cat([(part * factors).sum(dim=1) for part in rows.split(_ROWS_AT_ONCE)])  # no integer product there


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20260601)
    factors = torch.randint(-(2**62), 2**62, (_WORDS_PER_ROW,), generator=generator, dtype=torch.int64)
    return (2 * factors + 1).to(device)
