"""Memory for large columns: from numpy, which asks for huge pages where torch does not."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of any content."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def cat(pieces: list[Tensor]) -> Tensor:
    """torch.cat, faster for large columns."""
    if any(piece.device.type != "cpu" or piece.requires_grad for piece in pieces):
        return torch.cat(pieces)
    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    return torch.cat(pieces, out=uninitialised(shape, pieces[0].dtype))
