"""Between a batch and the TensorDicts of the tensordict package, which is imported where it is first needed: that takes
as long as importing torch, and who makes no batch need not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.protocol.columns import as_column, batch_rows

if TYPE_CHECKING:
    from tensordict import TensorDict


def tensordict_of(
    columns: Mapping[str, Any], batch_size: tuple[int, ...], device: torch.device | str | None = None
) -> TensorDict:
    from tensordict import TensorDict

    return TensorDict(dict(columns), batch_size=batch_size, device=device)


def split_tensordict(tensor_dict: TensorDict) -> tuple[TensorDict, dict[str, np.ndarray], dict[str, Any]]:
    """(the tensors, the non-tensors with a value per row, the non-tensors with one value for all rows)."""
    from tensordict import NonTensorData, NonTensorStack

    rows = batch_rows(tensor_dict)
    arrays: dict[str, np.ndarray] = {}
    whole: dict[str, Any] = {}
    rest: dict[str, Any] = {}
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
    meta_info: Mapping[str, Any],
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
