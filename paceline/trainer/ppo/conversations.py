"""Conversations of a step: agent processes have them with the rollout, and what comes back may have several rows each.

A row of a batch is a part of a conversation: one, unless the chat template changed what was there before. Rows of one
conversation share its reward. The column `conversation` says whose a row is; `uid` groups conversations, as ever.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch

from paceline.agents.conversation import FAILED
from paceline.agents.wire import Engines
from paceline.protocol import DataProto, DataProtoFuture
from paceline.rewards import at_last_token
from paceline.single_controller.ray import RayWorkerGroup
from paceline.trainer.ppo.corrected_columns import loss_mask_of
from paceline.trainer.ppo.dealing import share_out
from paceline.workers.agent_worker import AgentTask
from paceline.workers.reward_worker import EXTRA_INFO

CONVERSATION = "conversation"
INFO = "conversation_info"


class Conversations:
    """Has the prompts of a step answered by agents, with one rollout group."""

    def __init__(self, agents: RayWorkerGroup, rollout: RayWorkerGroup) -> None:
        self._engines: Engines | None = None
        self.agents, self.rollout = agents, rollout
        self._session = 0

    def issue(
        self, requests: DataProto, labels: DataProto, sampling: dict[str, Any], version: int | None = None
    ) -> DataProtoFuture:
        """Begin one conversation for each request, with the columns of its prompt in `labels`, by these weights."""
        asked = requests.select(meta_info_keys=[])
        asked.batch[CONVERSATION] = torch.arange(len(asked))
        for name, column in labels.non_tensor_batch.items():
            asked.non_tensor_batch[name] = column
        session = self.next_session()
        size = self.agents.world_size
        task = AgentTask(session, self.reachable(), len(asked))
        shares = [asked[rows] if rows.stop > rows.start else None for rows in share_out(len(asked), [1] * size)]
        self.agents.start_conversations(shares, [task] * size)
        served = self.rollout.serve_agents(session, size, sampling, version)
        return self.agents.finish_conversations().then(lambda parts: _joined(parts, served))

    def next_session(self) -> int:
        """A number that no session had."""
        self._session += 1
        return self._session

    def reachable(self) -> Engines:
        """The rollout's mailboxes, opened with the first step."""
        if self._engines is None:
            key = secrets.token_hex(32)
            is_local = not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1
            addresses = self.rollout.open_mailbox(key, is_local).get()
            self._engines = Engines(tuple((str(host), int(port)) for host, port in addresses), key)
        return self._engines


def _joined(parts: list[DataProto | None], served: DataProtoFuture) -> DataProto:
    served.get()  # an error of the rollout is one of the step
    return DataProto.concat([part for part in parts if part is not None])


def is_of_conversations(batch: DataProto) -> bool:
    return CONVERSATION in batch.batch


def join_labels(labels: DataProto, responses: DataProto) -> DataProto:
    """The columns of the prompts beside their responses; of conversations, for each row.

    What is known of a conversation is in `extra_info`, too, where a reward function finds it.
    """
    if not is_of_conversations(responses):
        return labels.select().union(responses)
    batch = labels[responses.batch[CONVERSATION].numpy()].union(responses)
    extra = np.empty(len(batch), dtype=object)
    given = batch.non_tensor_batch.get("extra_info", [None] * len(batch))
    known = batch.non_tensor_batch[INFO]
    extra[:] = [
        {**(own or {}), **{name: info[name] for name in ("num_turns", "turn_rewards", "ended_by")}}
        for own, info in zip(given, known, strict=True)
    ]
    batch.non_tensor_batch["extra_info"] = extra
    return batch


def numbered(responses: Sequence[DataProto]) -> DataProto:
    """Responses one after another; conversations, of one or more rows each, with their places among them."""
    parts = list(responses)
    if parts and is_of_conversations(parts[0]):
        parts = [part.select() for part in parts]
        for place, part in enumerate(parts):
            part.batch[CONVERSATION] = torch.full((len(part),), place)
    return DataProto.concat(parts)


def rows_of_response(responses: DataProto, place: int) -> DataProto:
    """The row of a response, or the rows of a conversation."""
    if not is_of_conversations(responses):
        return responses[place : place + 1]
    return responses[np.flatnonzero(responses.batch[CONVERSATION].numpy() == place)]


def last_rows(batch: DataProto) -> np.ndarray:
    """The row numbers of the last row of each conversation, in order."""
    whose = batch.batch[CONVERSATION].numpy()
    return np.flatnonzero(np.append(whose[1:] != whose[:-1], True))


def whole_conversations(batch: DataProto, column: str, *, by_turns: bool) -> DataProto:
    """One row of each conversation, the last. With `by_turns`, what turns of earlier rows earned is added to it in
    `column` (batch, response)."""
    last = last_rows(batch)
    whole = batch[last]
    if by_turns and len(last) < len(batch):
        turns = batch.batch["turn_scores"]
        places = torch.from_numpy(row_of_last(batch))
        totals = turns.new_zeros(len(last)).index_add_(0, places, turns.sum(dim=-1))
        missing = totals - whole.batch["turn_scores"].sum(dim=-1)
        whole.batch[column] = whole.batch[column] + at_last_token(missing, whole.batch["response_mask"])
    return whole


def row_of_last(batch: DataProto) -> np.ndarray:
    """For each row, the place of its conversation among all."""
    whose = batch.batch[CONVERSATION].numpy()
    return np.cumsum(np.append(False, whose[1:] != whose[:-1]))


def num_conversations(batch: DataProto) -> int:
    """Of a batch of single turns its rows."""
    return len(last_rows(batch)) if is_of_conversations(batch) else len(batch)


def scored_by_turns(batch: DataProto) -> DataProto:
    """Scores of conversations whose rewards are those of their turns; no reward function was asked."""
    rows = np.empty(len(batch), dtype=object)
    rows[:] = [{"score": float(sum(info["turn_rewards"]))} for info in batch.non_tensor_batch[INFO]]
    return DataProto.from_dict(
        tensors={"token_level_scores": batch.batch["turn_scores"].clone()}, non_tensors={EXTRA_INFO: rows}
    )


def spread_scores(batch: DataProto, scored: DataProto, *, with_turns: bool) -> DataProto:
    """Scores of whole conversations, from those of their last rows, at the last token of each of their rows; with the
    rewards of turns where those count too."""
    places = row_of_last(batch)
    totals = scored.batch["token_level_scores"].sum(dim=-1)[torch.from_numpy(places)]
    scores = at_last_token(totals, batch.batch["response_mask"])
    if with_turns:
        scores = scores + batch.batch["turn_scores"]
    return DataProto.from_dict(
        tensors={"token_level_scores": scores},
        non_tensors={EXTRA_INFO: scored.non_tensor_batch[EXTRA_INFO][places]},
        meta_info=scored.meta_info,
    )


def group_advantages(batch: DataProto, compute: Callable[[DataProto], DataProto], *, by_turns: bool) -> DataProto:
    """Advantages of an estimator that compares conversations: each counts once, by its last row, and what that gets its
    other rows get too."""
    if num_conversations(batch) == len(batch):
        return compute(batch)
    whole = whole_conversations(batch, "token_level_rewards", by_turns=by_turns)
    advantages = compute(whole).batch["advantages"]
    first = loss_mask_of(whole).argmax(dim=-1, keepdim=True)  # the same number at every token that trains
    shared = advantages.gather(-1, first)[torch.from_numpy(row_of_last(batch))] * loss_mask_of(batch)
    return batch.union(DataProto.from_dict(tensors={"advantages": shared, "returns": shared.clone()}))


def conversation_metrics(batch: DataProto) -> dict[str, float]:
    """How long conversations were, how they ended, and what their loops and tools counted."""
    infos = [batch.non_tensor_batch[INFO][row] for row in last_rows(batch)]
    turns = [info["num_turns"] for info in infos]
    reasons = Counter(info["ended_by"] for info in infos)
    counts: Counter[str] = Counter()
    for info in infos:
        counts.update(info["counts"])
    attended = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[-1] :].sum().item()
    own = batch.batch["response_mask"].sum().item()
    metrics = {
        "agent/num_turns/mean": float(np.mean(turns)),
        "agent/num_turns/max": float(max(turns)),
        "agent/num_turns/min": float(min(turns)),
        "agent/share_of_observations": 1 - own / attended if attended else 0.0,
        "agent/rows": float(len(batch)),
        "agent/failed": float(reasons[FAILED]),
    }
    metrics |= {f"agent/ended_by/{reason}": count / len(infos) for reason, count in reasons.items()}
    return metrics | {f"agent/{name}": float(number) for name, number in counts.items()}
