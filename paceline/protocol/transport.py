"""How the tensors of a batch travel: as numpy arrays over their memory, which pickle moves out of band."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers_of(tensor: Tensor) -> np.ndarray | None:
    """The bits of a dense tensor on the CPU, as unsigned integers of its elements' size; None for wider elements."""
    kind = _INTEGER_OF_SIZE.get(tensor.element_size())
    if kind is None or tensor.layout != torch.strided or tensor.is_complex():
        return None
    array = tensor.contiguous().view(kind).numpy()
    return array.view(f"u{array.itemsize}")


class Sent:
    """A tensor that pickles as a numpy array over its memory, which protocol 5 moves out of band, and comes back as a
    tensor. It arrives detached and on the CPU; dtypes that numpy lacks (bfloat16, float8) travel as integers."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
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


def with_tensors_sent(value: object) -> object:
    """The same containers, with their tensors ready to be pickled."""
    if isinstance(value, Tensor):
        return Sent(value)
    if type(value) is dict:
        return {key: with_tensors_sent(item) for key, item in value.items()}
    if type(value) is list:
        return [with_tensors_sent(item) for item in value]
    if type(value) is tuple:
        return tuple(with_tensors_sent(item) for item in value)
    return value
