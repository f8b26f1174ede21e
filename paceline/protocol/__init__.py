"""The batch that every phase reads and writes, and the promise of one that is still being computed.

A `DataProto` holds named columns of equal length: tensors in `batch`, numpy arrays (usually of objects) in
`non_tensor_batch`, and in `meta_info` what belongs to the batch as a whole.

>>> import torch
>>> from paceline.protocol import DataProto
>>> data = DataProto.from_dict({"prompts": torch.zeros(4, 3)}, {"uid": ["a", "a", "b", "b"]}, {"temperature": 1.0})
>>> data
DataProto(4 rows, 48 B | prompts float32(4, 3) | uid object(4) | meta temperature)
>>> [len(shard) for shard in data.chunk(2)]
[2, 2]

Pickled, as Ray does to send it, its tensors and numeric arrays are out-of-band buffers, which a reader on the same
machine maps and does not copy. **Received columns are immutable**: torch can't enforce it, and a write in place would
change the batch of every other reader. `clone()` before writing; workers that users write get clones
(docs/single_controller.md). docs/protocol.md says what is a view and what a copy.

The names load on first use, and torch with them: a process that gets no batch needs neither.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from paceline.protocol.batch import (
        DataProto,
        DataProtoConfig,
        DataProtoItem,
        _received,
    )
    from paceline.protocol.future import DataProtoFuture
    from paceline.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
    from paceline.protocol.transport import _tensor_over

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "_received",  # the pickles that an earlier version wrote name these two here
    "_tensor_over",
    "is_batch",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
_ELSEWHERE = {
    "DataProtoFuture": "future",
    "_tensor_over": "transport",
    "pad_dataproto_to_divisor": "padding",
    "unpad_dataproto": "padding",
}
"""Those that are not of `batch`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'batch')}"), name)
    globals()[name] = value
    return value


def is_batch(value: object) -> TypeGuard[DataProto]:
    """Whether it is a DataProto; loads nothing, since where nothing is loaded there is none."""
    return f"{__name__}.batch" in sys.modules and isinstance(value, sys.modules[__name__].DataProto)
