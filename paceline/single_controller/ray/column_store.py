"""Where the large columns of answers stay: in the object store of the node that made them, until somebody reads them.

The driver gets references, and sends them on; the worker that needs the rows fetches them. An object is freed when no
batch names it any more. Its owner is the worker that made it: with that process its columns are gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import WorkerError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.protocol import DataProto
    from paceline.protocol.held import StoredRows

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
        from paceline.protocol.leaving import left_behind  # a worker that never answers with a batch needs no torch

        return left_behind(answer, lambda tensors: self.keep(tensors, maker), self.min_bytes)


@dataclass(frozen=True)
class ObjectStore(ColumnStore):
    """Ray's own."""

    min_bytes: int = SMALLEST_BYTES

    def keep(self, tensors: list[Tensor], maker: Maker) -> Sequence[StoredRows]:
        from paceline.single_controller.ray.object_rows import ObjectRows

        return [ObjectRows.of(tensor, maker) for tensor in tensors]
