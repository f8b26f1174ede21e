"""Where the large columns of answers stay: in the object store of the node that made them, until somebody reads them.

The driver gets references, and sends them on; the worker that needs the rows fetches them. An object is freed when no
batch names it any more. Its owner is the worker that made it: with that process its columns are gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import ray
from ray.exceptions import RayError
from torch import Tensor

from paceline.errors import WorkerError
from paceline.protocol import DataProto
from paceline.protocol.held import StoredRows
from paceline.protocol.leaving import left_behind
from paceline.protocol.transport import Sent
from paceline.single_controller.ray.watch import watch

SMALLEST_BYTES = 32_000


@dataclass(frozen=True)
class Maker:
    """Which call on which rank gave an answer."""

    role: str
    rank: int
    method: str

    def lost(self, found: str) -> WorkerError:
        """The error for who wants a column of it that can't be had."""
        return WorkerError(
            self.role,
            self.rank,
            self.method,
            f"columns of its answer stayed in its process's care and can't be fetched any more: {found}. "
            "If the workers were shut down, read these columns before.",
        )


class ColumnStore(ABC):
    """Keeps the large columns of answers."""

    min_bytes: int
    """Columns of fewer go along with the answer."""

    @abstractmethod
    def keep(self, tensors: list[Tensor], maker: Maker) -> Sequence[StoredRows]:
        """Store pieces of a column, in the process that made it."""

    def step_closed(self, step: int) -> None:  # noqa: B027 (most have nothing to do)
        """A step has ended: the driver says so."""

    def leave(self, answer: DataProto, maker: Maker) -> DataProto:
        """The answer as it goes to the driver."""
        return left_behind(answer, lambda tensors: self.keep(tensors, maker), self.min_bytes)


class ObjectRows(StoredRows):
    """Rows of a column in Ray's object store."""

    def __init__(self, ref: ray.ObjectRef, rows: int, maker: Maker) -> None:
        self.ref = ref
        self.rows = rows
        self.maker = maker

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectRows, (self.ref, self.rows, self.maker)

    @classmethod
    def fetch(cls, stored: Sequence[Self]) -> list[Tensor]:
        try:
            return ray.get([one.ref for one in stored])
        except RayError:
            watch.raise_failure()  # of a call that may be the cause
            raise _find_lost(stored) from None


def _find_lost(stored: Sequence[ObjectRows]) -> WorkerError:
    for one in stored:
        try:
            ray.get(one.ref)
        except RayError as error:
            return one.maker.lost(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return stored[0].maker.lost("they were lost and came back; ask again")


@dataclass(frozen=True)
class ObjectStore(ColumnStore):
    """Ray's own."""

    min_bytes: int = SMALLEST_BYTES

    def keep(self, tensors: list[Tensor], maker: Maker) -> Sequence[StoredRows]:
        return [ObjectRows(ray.put(Sent(tensor)), len(tensor), maker) for tensor in tensors]
