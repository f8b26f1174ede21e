"""Single requests to the rollout's workers: who samples what, and what has come back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.protocol import DataProto

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup

POLL_SECONDS = 0.02
"""Between two questions for what has ended; each interrupts the sampling for a moment."""


class RequestPool:
    """The requests of one worker group. Those of a group of responses stay on one worker, where their prefix is cached.

    With `is_beside` the workers sample in a thread beside the calls; else they sample in the call that asks for
    responses, as they train in the same process.
    """

    def __init__(self, group: RayWorkerGroup, *, is_beside: bool) -> None:
        self._group = group
        self.is_beside = is_beside
        self._rank_of: dict[str, int] = {}

    def submit(self, groups: Sequence[DataProto]) -> None:
        """Have all rows sampled; the workers with the fewest requests take the next group."""
        ranks: list[list[DataProto]] = [[] for _ in range(self._group.world_size)]
        load = [sum(rank == own for rank in self._rank_of.values()) for own in range(len(ranks))]
        for group in groups:
            rank = load.index(min(load))
            load[rank] += len(group)
            ranks[rank].append(group)
            self._rank_of |= dict.fromkeys(group.non_tensor_batch["request_id"], rank)
        self._group.submit_requests([DataProto.concat(parts) if parts else None for parts in ranks])

    def collect(self, wanted: int) -> list[DataProto]:
        """Rows that have ended, at least one if any is under way; where workers sample in this call, `wanted` if they
        can, so that none samples more than is needed."""
        while True:
            if self.is_beside:
                answers = self._group.collect_finished().get()
            else:
                counts = [sum(rank == own for rank in self._rank_of.values()) for own in range(self._group.world_size)]
                shares = [min(count, -(-wanted // len(counts))) for count in counts]
                answers = self._group.decode_until(shares).get()
            rows = [answer[row : row + 1] for answer in answers if len(answer) for row in range(len(answer))]
            for row in rows:
                del self._rank_of[row.non_tensor_batch["request_id"][0]]
            if rows or not self._rank_of:
                return rows
            time.sleep(POLL_SECONDS)

    def abort(self, names: Iterable[str]) -> None:
        """Forget requests that were submitted and not collected."""
        ranks: list[list[str]] = [[] for _ in range(self._group.world_size)]
        for name in names:
            ranks[self._rank_of.pop(name)].append(name)
        self._group.abort_requests(ranks)

    def is_under_way(self, name: str) -> bool:
        return name in self._rank_of


def named_requests(requests: DataProto, names: Sequence[str]) -> DataProto:
    """Rows of a batch of requests with their names."""
    named = requests.select()
    named.non_tensor_batch["request_id"] = np.array(names, dtype=object)
    return named
