"""The agent processes: they have conversations with the rollout, so that tools take no time of a device."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.agents.link import EngineLink
from paceline.agents.runner import Ended, Job, Runner, make_context
from paceline.agents.template import ChatTemplate
from paceline.agents.wire import Engines
from paceline.config import DataConfig, RolloutConfig
from paceline.protocol import DataProto
from paceline.rollout.postprocess import prompt_token_lists
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.workers.agent_rows import rows_to_batch

logger = logging.getLogger(__name__)

MOST_PROBLEMS = 3
"""Of a step, that are written to the log."""


@dataclass(frozen=True)
class AgentTask:
    """What the agents of a step are told besides their rows."""

    session: int
    engines: Engines
    num_conversations: int
    """Of all agents: says which rank of the rollout samples which."""


class AgentWorker(Worker):
    """Has its share of the conversations of a step, all at the same time."""

    leaves_inputs_alone = True

    def __init__(
        self,
        rollout: RolloutConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        with_chats: bool = False,
    ) -> None:
        super().__init__()
        self._with_chats = with_chats
        self._lengths = (data.max_prompt_length, data.max_response_length)
        self._pad_token_id = int(tokenizer.pad_token_id)
        self._runner = make_runner(rollout, data, tokenizer)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True).start()
        self._ended: Future[list[Ended]] | None = None
        self._stream: EngineLink | None = None
        self._under_way: dict[str, Future[Ended]] = {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def start_conversations(self, data: DataProto | None, task: AgentTask) -> None:
        """Begin one conversation for each row. `finish_conversations` must follow."""
        link = EngineLink(task.session, self.rank)
        asyncio.run_coroutine_threadsafe(link.connect(task.engines), self._loop).result()
        jobs = [] if data is None else jobs_of(data, task)
        self._ended = asyncio.run_coroutine_threadsafe(self._runner.run(jobs, link), self._loop)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_conversations(self) -> DataProto | None:
        """What became of them: see `rows_to_batch`. None from an agent without a row."""
        assert self._ended is not None, "start_conversations comes first"
        ended, self._ended = self._ended.result(), None
        return self._batch(ended) if ended else None

    def _batch(self, ended: Sequence[Ended], *, with_versions: bool = False) -> DataProto:
        problems = [one.problem for one in ended if one.problem]
        if problems:
            shown = "; ".join(dict.fromkeys(problems[:MOST_PROBLEMS]))
            logger.warning("%d of %d conversations failed and are left out: %s", len(problems), len(ended), shown)
        return rows_to_batch(
            ended, *self._lengths, self._pad_token_id, with_chats=self._with_chats, with_versions=with_versions
        )

    # In a streaming schedule: conversations that come and go, over a session as long as the run. All calls are short.

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def open_conversations(self, session: int, engines: Engines) -> None:
        """Reach the rollout, for `submit_conversations`."""
        link = self._stream = EngineLink(session, self.rank)
        asyncio.run_coroutine_threadsafe(link.connect(engines), self._loop).result()
        self._loop.call_soon_threadsafe(link.begin)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def submit_conversations(self, data: DataProto | None) -> None:
        """Begin one conversation for each row, named by column `request_id`, with the process `rank` of the rollout."""
        if data is None:
            return
        prompts, names = prompt_token_lists(data), data.non_tensor_batch["request_id"]
        orders, ranks, seeds = (data.batch[name].tolist() for name in ("conversation", "rank", "seeds"))
        for row, name in enumerate(names):
            job = Job(orders[row], ranks[row], row_of(data, row), prompts[row], seeds[row], name)
            self._under_way[name] = asyncio.run_coroutine_threadsafe(self._have(job), self._loop)

    async def _have(self, job: Job) -> Ended:
        link = self._stream
        assert link is not None, "open_conversations comes first"
        try:
            return await self._runner.stream(job, link)
        finally:
            link.say_over(job.rank, job.name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def collect_conversations(self) -> DataProto | None:
        """Those that have ended since the last call; see `rows_to_batch`."""
        names = [name for name, future in self._under_way.items() if future.done()]
        ended = [self._under_way.pop(name).result() for name in names]
        return self._batch(ended, with_versions=True) if ended else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def abort_conversations(self, names: Collection[str]) -> None:
        """Leave these, whether they have ended or not."""
        for name in set(names) & self._under_way.keys():
            self._under_way.pop(name).cancel()


def make_runner(rollout: RolloutConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Runner:
    """Who has the conversations of a run; a ConfigError for tools and loops that can't be made."""
    context = make_context(
        ChatTemplate(tokenizer, data.apply_chat_template_kwargs),
        rollout.multi_turn,
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
    )
    return Runner(rollout.agent, context)


def jobs_of(data: DataProto, task: AgentTask) -> list[Job]:
    """The conversations of rows, each with the rank that a batch of single turns would go to."""
    num_ranks = len(task.engines.addresses)
    base, extra = divmod(task.num_conversations, num_ranks)
    starts = [rank * base + min(rank, extra) for rank in range(num_ranks)]
    orders, seeds = data.batch["conversation"].tolist(), data.batch["seeds"].tolist()
    return [
        Job(
            order,
            max(rank for rank in range(num_ranks) if starts[rank] <= order),
            row_of(data, row),
            prompt_ids,
            seed,
        )
        for row, (order, seed, prompt_ids) in enumerate(zip(orders, seeds, prompt_token_lists(data), strict=True))
    ]


def row_of(data: DataProto, row: int) -> dict[str, Any]:
    """The columns of a prompt, as loops read them."""
    return {name: column[row] for name, column in data.non_tensor_batch.items()}
