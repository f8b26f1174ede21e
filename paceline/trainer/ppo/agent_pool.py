"""Conversations of a streaming schedule: who has them, who samples their turns, and what has come back."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from paceline.protocol import DataProto
from paceline.trainer.ppo.conversations import Conversations
from paceline.trainer.ppo.request_pool import POLL_SECONDS


class AgentPool:
    """What `RequestPool` is for single responses: a conversation is a request.

    Its turns are sampled by one process of the rollout: between calls (`is_beside`), or in a call that ends when as
    many conversations have ended as are wanted.
    """

    reads_labels = True
    """Loops read the columns of a prompt."""

    def __init__(self, conversations: Conversations, *, is_beside: bool, kv_cache: str) -> None:
        self._agents, self._rollout = conversations.agents, conversations.rollout
        self._conversations = conversations
        self.is_beside = is_beside
        self._kv_cache = kv_cache
        self._numbers = itertools.count()
        self._place_of: dict[str, tuple[int, int]] = {}
        """Of the conversations under way: agent, and process of the rollout."""
        self._is_open = False

    def submit(self, groups: Sequence[DataProto]) -> None:
        """Begin a conversation for each row; those of a group have the same process of the rollout."""
        if not self._is_open:
            self._open(groups[0])
        shares: list[list[DataProto]] = [[] for _ in range(self._agents.world_size)]
        for group in groups:
            agent, rank = (_least(self._load(kind), size) for kind, size in enumerate(self._sizes))
            names = group.non_tensor_batch["request_id"]
            self._place_of |= dict.fromkeys(names, (agent, rank))
            asked = group.select(meta_info_keys=[])
            asked.batch["conversation"] = torch.tensor([next(self._numbers) for _ in names])
            asked.batch["rank"] = torch.full((len(group),), rank)
            shares[agent].append(asked)
        self._agents.submit_conversations([DataProto.concat(parts) if parts else None for parts in shares])

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._agents.world_size, self._rollout.world_size

    def _load(self, kind: int) -> Counter[int]:
        """Conversations of each agent (0), or of each process of the rollout (1)."""
        return Counter(place[kind] for place in self._place_of.values())

    def _open(self, first: DataProto) -> None:
        """Agents and rollout know each other from now on. All requests of a run are sampled alike."""
        session, engines = self._conversations.next_session(), self._conversations.reachable()
        sampling = first.meta_info["sampling"]
        self._rollout.open_stream(session, self._agents.world_size, sampling, self.is_beside, self._kv_cache).get()
        self._agents.open_conversations(session, engines)
        self._is_open = True

    def collect(self, wanted: int) -> list[DataProto]:
        """Conversations that have ended, at least one if any is under way; each has one row or more."""
        while True:
            ended = self.poll(wanted)
            if ended or not self._place_of:
                return ended
            time.sleep(POLL_SECONDS)

    def poll(self, wanted: int) -> list[DataProto]:
        """`collect` that does not wait for any to end, where the rollout samples beside the calls."""
        if self.is_beside:
            self._rollout.follow_stream().get()
        else:
            size = self._rollout.world_size
            names: list[list[str]] = [[] for _ in range(size)]
            for name, (_, rank) in self._place_of.items():
                names[rank].append(name)
            self._rollout.serve_until(names, [min(len(own), -(-wanted // size)) for own in names]).get()
        found = [answer for answer in self._agents.collect_conversations().get() if answer is not None]
        ended = [part for answer in found for part in _by_name(answer)]
        for part in ended:
            del self._place_of[part.non_tensor_batch["request_id"][0]]
        return ended

    def abort(self, names: Iterable[str]) -> None:
        """Leave conversations that were submitted and not collected."""
        gone = list(names)
        for name in gone:
            del self._place_of[name]
        self._agents.abort_conversations(gone)


def _least(load: Counter[int], size: int) -> int:
    return min(range(size), key=lambda place: load[place])


def _by_name(answer: DataProto) -> list[DataProto]:
    """The rows of each conversation."""
    names = answer.non_tensor_batch["request_id"]
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return [answer[rows[name]] for name in rows]
