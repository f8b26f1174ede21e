"""Single requests to the rollout's workers: who samples what, who takes over from whom, and what has come back."""

from __future__ import annotations

import time
from collections import Counter
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
    responses, as they train in the same process. A worker decodes `places` requests at a time. Groups that wait at one
    while another has places left go there. With `is_fixed`, workers share rows as they do those of a batch: what is
    decoded together, and with it the last bits, is then a function of the rows alone.
    """

    reads_labels = False
    """A worker needs no more than the prompts."""

    def __init__(self, group: RayWorkerGroup, *, is_beside: bool, places: int, is_fixed: bool) -> None:
        self._group = group
        self.is_beside = is_beside
        self._places = places
        self._is_fixed = is_fixed
        self._rank_of: dict[str, int] = {}
        self._group_of: dict[str, DataProto] = {}
        """The requests that each came with."""

    def submit(self, groups: Sequence[DataProto]) -> None:
        """Have all rows sampled; the workers with the fewest requests take the next group."""
        if self._is_fixed:
            rows = DataProto.concat(list(groups))
            share = -(-len(rows) // self._group.world_size)
            parts = [rows[first : first + share] for first in range(0, share * self._group.world_size, share)]
            self._send([[part] if len(part) else [] for part in parts])
            return
        ranks: list[list[DataProto]] = [[] for _ in range(self._group.world_size)]
        load = self._load()
        for group in groups:
            rank = load.index(min(load))
            load[rank] += len(group)
            ranks[rank].append(group)
        self._send(ranks)

    def _send(self, ranks: Sequence[Sequence[DataProto]]) -> None:
        for rank, groups in enumerate(ranks):
            for group in groups:
                names = group.non_tensor_batch["request_id"]
                self._rank_of |= dict.fromkeys(names, rank)
                self._group_of |= dict.fromkeys(names, group)
        self._group.submit_requests([DataProto.concat(list(parts)) if parts else None for parts in ranks])

    def _load(self) -> list[int]:
        """Requests of each worker."""
        counts = Counter(self._rank_of.values())
        return [counts[rank] for rank in range(self._group.world_size)]

    def collect(self, wanted: int) -> list[DataProto]:
        """Rows that have ended, at least one if any is under way; where workers sample in this call, `wanted` if they
        can, so that none samples more than is needed."""
        while True:
            rows = self.poll(wanted)
            if rows or not self._rank_of:
                return rows
            time.sleep(POLL_SECONDS)

    def poll(self, wanted: int) -> list[DataProto]:
        """`collect` that does not wait for any to end, where workers sample beside the calls."""
        load = self._load()
        if self.is_beside:
            answers = self._group.collect_finished().get()
        else:
            answers = self._group.decode_until([min(count, -(-wanted // len(load))) for count in load]).get()
        rows = [answer[row : row + 1] for answer in answers if len(answer) for row in range(len(answer))]
        for row in rows:
            self._forget(row.non_tensor_batch["request_id"][0])
        if len(load) > 1 and not self._is_fixed:
            self._balance([set(answer.meta_info["not_begun"]) for answer in answers])
        return rows

    def _forget(self, name: str) -> int:
        """A request is done with; gives the worker that it was at."""
        del self._group_of[name]
        return self._rank_of.pop(name)

    def _balance(self, not_begun: Sequence[set[str]]) -> None:
        """Let workers with places left take over groups that wait at others, and of which nothing was sampled."""
        load = self._load()
        waiting: list[list[DataProto]] = [[] for _ in load]
        for group in {id(group): group for group in self._group_of.values()}.values():
            names = group.non_tensor_batch["request_id"]
            rank = self._rank_of.get(names[0])
            if rank is not None and not_begun[rank].issuperset(names):
                waiting[rank].append(group)
        moves: list[list[DataProto]] = [[] for _ in load]
        while any(waiting):
            to = load.index(min(load))
            at = max((rank for rank, groups in enumerate(waiting) if groups), key=lambda rank: load[rank])
            group = waiting[at][-1]
            if load[to] >= self._places or load[at] - load[to] < len(group):
                break
            moves[to].append(waiting[at].pop())
            load[to], load[at] = load[to] + len(group), load[at] - len(group)
        if any(moves):
            self.abort(name for groups in moves for group in groups for name in group.non_tensor_batch["request_id"])
            self._send(moves)

    def abort(self, names: Iterable[str]) -> None:
        """Forget requests that were submitted and not collected."""
        ranks: list[list[str]] = [[] for _ in range(self._group.world_size)]
        for name in names:
            ranks[self._forget(name)].append(name)
        self._group.abort_requests(ranks)


def named_requests(requests: DataProto, names: Sequence[str]) -> DataProto:
    """Rows of a batch of requests with their names."""
    named = requests.select()
    named.non_tensor_batch["request_id"] = np.array(names, dtype=object)
    return named
