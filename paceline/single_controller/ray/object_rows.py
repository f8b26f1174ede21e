"""Rows of columns in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import numpy as np
import ray
from ray.exceptions import RayError
from torch import Tensor

from paceline.errors import WorkerError
from paceline.protocol.held import StoredRows, rows_of
from paceline.protocol.transport import Sent
from paceline.single_controller.ray.column_store import Maker
from paceline.single_controller.ray.watch import watch


class ObjectRows(StoredRows):
    """Rows of a column in Ray's object store."""

    def __init__(self, ref: ray.ObjectRef, rows: int, maker: Maker) -> None:
        self.ref = ref
        self.rows = rows
        self.maker = maker

    @classmethod
    def of(cls, tensor: Tensor, maker: Maker) -> Self:
        """Put there now."""
        return cls(ray.put(Sent(tensor)), len(tensor), maker)

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectRows, (self.ref, self.rows, self.maker)

    @classmethod
    def fetch(cls, wanted: Sequence[tuple[Self, np.ndarray]]) -> list[Tensor]:
        refs = list(dict.fromkeys(one.ref for one, _ in wanted))
        try:
            whole = dict(zip(refs, ray.get(refs), strict=True))
        except RayError:
            watch.raise_failure()  # of a call that may be the cause
            raise _find_lost([one for one, _ in wanted]) from None
        return [cast(Tensor, rows_of(whole[one.ref], rows)) for one, rows in wanted]


def _find_lost(stored: Sequence[ObjectRows]) -> WorkerError:
    for one in stored:
        try:
            ray.get(one.ref)
        except RayError as error:
            return one.maker.lost(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return stored[0].maker.lost("they were lost and came back; ask again")
