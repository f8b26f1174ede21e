"""A dictionary of values as one safetensors file: its tensors, and the rest as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import DataError
from paceline.files import replacing
from paceline.protocol.columns import as_column

_FORMAT = "paceline.DataProto/1"
_JSON = "json"
_PLACES = {"tensors": "batch", "non_tensors": "non_tensor_batch"}
"""How users call what the file calls otherwise."""


def write(path: str | os.PathLike[str], content: Mapping[str, object]) -> None:
    """Write the file, complete or not at all. A value that can't be saved is a DataError that names it by its keys."""
    tensors: dict[str, Tensor] = {}
    packed = {name: _pack(value, tensors, _PLACES.get(name, name)) for name, value in content.items()}
    tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, durable=False, many_writers=True) as unfinished:
        save_file(tensors, unfinished, metadata={"format": _FORMAT})


def can_be_saved(value: object) -> bool:
    """Whether `write` takes it."""
    try:
        json.dumps(_pack(value, {}, ""))
    except (DataError, TypeError, ValueError):
        return False
    return True


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write` was given. No code in the file is ever run."""
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format")
            if found != _FORMAT:
                raise DataError(f"{path} is a safetensors file of format {found!r}, not {_FORMAT!r}.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise DataError(f"{path} was not written by DataProto.save_to_disk: {error}") from error
    packed = json.loads(tensors.pop(_JSON).numpy().tobytes())
    return {name: _unpack(value, tensors) for name, value in packed.items()}


def _pack(value: object, tensors: dict[str, Tensor], where: str) -> object:
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
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_pack(item, tensors, f"{where}[{place}]") for place, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is dict:
        packed = {key: _pack(item, tensors, f"{where}.{key}") for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return packed
        return {"$dict": [[_pack(key, tensors, where), item] for key, item in packed.items()]}
    raise DataError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which can't be saved; use None, bool, "
        "int, float, str, numpy scalars and arrays, tensors, or lists, tuples and dicts of these."
    )


def _unpack(value: object, tensors: Mapping[str, Tensor]) -> Any:
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
            return as_column(tag, [_unpack(cell, tensors) for cell in cells]).astype(dtype).reshape(shape)
        case "$scalar":
            return np.dtype(content[0]).type(content[1])
        case "$tuple":
            return tuple(_unpack(content, tensors))
        case "$dict":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    return {key: _unpack(item, tensors) for key, item in value.items()}
