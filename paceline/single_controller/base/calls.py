"""One call on one rank: how it is run, so that what it writes to its arguments stays its own, and its record.

Received columns are memory that all readers share. Classes with `leaves_inputs_alone = True` get them as they are;
the methods of other classes, which users write, get copies. Who defines a method decides: a user's subclass of such a
class inherits its methods without copies. These may call code of the subclass, so their inputs are compared instead,
by checksums before and after.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from paceline import protocol
from paceline.single_controller.base.worker import Worker

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")
Column: TypeAlias = "torch.Tensor | np.ndarray"

call_tag: ContextVar[dict[str, object]] = ContextVar("call_tag")
"""Set by the driver; every call issued under it carries a copy in its record. Example: `call_tag.set({"step": 3})`.

While a call runs it is that copy: what a method adds to it stands in the record."""


@dataclass(frozen=True)
class CallRecord:
    """One finished call on one rank: who ran it, where, from when to when.

    >>> record = CallRecord("main", "trainer+scorer", "scorer", 1, 4711, "10.0.0.5", "score", 12.0, 12.5, {"step": 3})
    >>> record.end - record.start
    0.5
    """

    pool: str
    process_roles: str
    """All roles of the process, joined by +: with `pool` and `rank`, the name of the process."""
    role: str
    rank: int
    pid: int
    node: str
    method: str
    start: float
    """Seconds since the epoch, by the worker's clock, after its inputs had arrived."""
    end: float
    tag: dict[str, object]


def run_method(
    worker: Worker,
    method: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    check_inputs: bool = False,
) -> Any:
    """What the method returns for these arguments; a coroutine is run to its end.

    With `check_inputs`, all methods that get no copies are watched, also those of paceline.
    """
    watched: dict[str, Column] = {}
    if not leaves_inputs_alone(worker, method):
        args, kwargs = private_copy((args, kwargs), worker, method)
    elif check_inputs or not _promises(type(worker)):
        watched = _shared_columns(args, kwargs)
    before = _checksums(watched)
    with worker.around_call():
        output = getattr(worker, method)(*args, **kwargs)
        if inspect.iscoroutine(output):
            # In this thread, to its end: calls stay in order. The loop is kept, as clients of users belong to one.
            output = _loop().run(output, context=contextvars.copy_context())
    if changed := sorted(set(before.items()) - set(_checksums(watched).items())):
        names = ", ".join(name for name, _ in changed)
        raise RuntimeError(
            f"received columns are shared with every other reader, but these were changed in place: {names}. "
            f"Clone a column before writing to it."
        )
    return output


def leaves_inputs_alone(worker: Worker, method: str) -> bool:
    """Whether the class that defines the method promises it; a method set on the worker itself has no such class."""
    if method in vars(worker):
        return False
    owner = next((cls for cls in type(worker).__mro__ if method in vars(cls)), object)
    return _promises(owner)


def private_copy(value: T, worker: Worker, method: str) -> T:
    """A copy that shares nothing with `value`."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        name = type(worker).__name__
        raise TypeError(
            f"{name}.{method} gets and gives copies, as it may write to its arguments, but one can't be made: {error}. "
            f"Set leaves_inputs_alone = True in the body of {name} if its methods never write to their arguments."
        ) from error


def _promises(cls: type) -> bool:
    """Whether `leaves_inputs_alone` is set in its own body: that of a base says nothing about a subclass."""
    return bool(vars(cls).get("leaves_inputs_alone", False))


@cache
def _loop() -> asyncio.Runner:
    return asyncio.Runner()


def _shared_columns(args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Column]:
    """Every tensor of every batch, and every array that is not of objects, named `argument.column`."""
    named = [*((str(index), arg) for index, arg in enumerate(args)), *kwargs.items()]
    return dict(_columns({name: value for name, value in named if protocol.is_batch(value)}, ""))


def _checksums(columns: dict[str, Column]) -> dict[str, int]:
    return {name: zlib.crc32(_bytes_of(column).data) for name, column in columns.items()}


def _columns(value: object, name: str) -> Iterator[tuple[str, Column]]:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        yield name, value
    elif protocol.is_batch(value):
        for part in (value.batch, value.non_tensor_batch, value.meta_info):
            yield from _columns(dict(part.items()) if part is not None else {}, name)
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _columns(item, f"{name}.{key}" if name else str(key))


def _bytes_of(column: Column) -> np.ndarray:
    import numpy as np
    import torch

    if isinstance(column, torch.Tensor):
        return column.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8)
