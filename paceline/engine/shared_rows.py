"""Ranks that compute the same rows together, each a part of the work.

The driver deals rows to ranks and knows nothing of groups: the ranks of a group put theirs together first, and each
gives back its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.distributed import gather_objects
from paceline.engine.engine_interface import LossFn, MicroBatchSize
from paceline.engine.micro_batch_engine import MicroBatchEngine
from paceline.engine.top_tokens import Likeliest
from paceline.protocol import DataProto

if TYPE_CHECKING:
    from tensordict import TensorDict


class SharedRows(MicroBatchEngine):
    """An engine of which the ranks of `row_group` see the same rows, and have all of their answers."""

    row_group: dist.ProcessGroup | None = None
    """None: each rank has rows of its own."""

    @property
    def row_rank(self) -> int:
        """This rank among those that share rows."""
        return 0 if self.row_group is None else dist.get_rank(self.row_group)

    def train_batch(
        self, data: DataProto, loss_fn: LossFn, *, temperature: float = 1.0, **size: Unpack[MicroBatchSize]
    ) -> dict[str, float]:
        return super().train_batch(self._rows_of_group(data)[0], loss_fn, temperature=temperature, **size)

    def infer_batch(
        self,
        data: DataProto,
        *,
        temperature: float = 1.0,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
        **size: Unpack[MicroBatchSize],
    ) -> dict[str, Tensor]:
        rows, own = self._rows_of_group(data)
        asked: dict[str, Any] = {"sum_pi_squared": sum_pi_squared, "likeliest": likeliest}
        answers = super().infer_batch(rows, temperature=temperature, **asked, **size)
        return {name: values[own] for name, values in answers.items()}

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        # All ranks of a group have computed the same; what is not finite stays so when it is multiplied by 0.
        return super()._sum_over_ranks({name: 0.0 * value for name, value in sums.items()} if self.row_rank else sums)

    def _rows_of_group(self, data: DataProto) -> tuple[DataProto, slice]:
        """The rows of all ranks of the group, and where this rank's are among them. Collective."""
        if self.row_group is None:
            return data, slice(0, len(data))
        columns: TensorDict = data.batch
        own: dict[str, Any] = dict(columns.items())
        parts = gather_objects(own, self.row_group)
        lengths = [len(part["attention_mask"]) for part in parts]
        start = sum(lengths[: self.row_rank])
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return DataProto.from_dict(tensors=rows), slice(start, start + len(data))
