"""All conversations of a process, in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.agents.conversation import FAILED, Conversation, ConversationLimits, ConversationRow, Sampled, Turn
from paceline.agents.link import EngineLink, LinkError
from paceline.agents.loops import LOOPS, AgentContext, AgentLoop, AgentRequest, Choices
from paceline.agents.parsers import ToolFormat
from paceline.agents.template import ChatTemplate, Message
from paceline.agents.tools import Toolbox, read_tools
from paceline.agents.wire import Wanted
from paceline.catalog import AGENT_LOOPS
from paceline.config import AgentConfig, MultiTurnConfig
from paceline.errors import ConfigError, PacelineError
from paceline.external import import_named
from paceline.text import unknown_choice

logger = logging.getLogger(__name__)

LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


@dataclass(frozen=True)
class Job:
    """A conversation to be had."""

    order: int
    """Its place in the step."""
    rank: int
    """Of the rollout's process that samples its turns."""
    row: Mapping[str, Any]
    prompt_ids: list[int]
    seed: int
    name: str = ""
    """In a stream, by which the driver knows it."""


@dataclass
class Ended:
    """What became of a conversation."""

    order: int
    rows: list[ConversationRow]
    ended_by: str
    turns: list[Turn] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    messages: list[Message] | str = ""
    """What was said, as its last row has it; a text, where the prompt is one."""
    problem: str = ""
    name: str = ""


def read_loops(path: str | None) -> dict[str, dict[str, Any]]:
    """The loops of a user's file by name; a ConfigError with all that is wrong with it."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{LOOPS_KEY}={path}: it can't be read: {error}.") from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{LOOPS_KEY}={path}: it must be a list of at least one loop, each with name and _target_.")
    problems, loops = [], {}
    for number, item in enumerate(content):
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("name", "_target_")):
            problems.append(f"item {number} needs `name` and `_target_`, a class with dots or file.py:Class.")
        elif item["name"] in loops:
            problems.append(f"two loops are called {item['name']!r}.")
        else:
            loops[item["name"]] = {key: value for key, value in item.items() if key != "name"}
    if problems:
        raise ConfigError([f"{LOOPS_KEY}={path}: {problem}" for problem in problems])
    return loops


def make_loop(name: str, loops: Mapping[str, Mapping[str, Any]], context: AgentContext) -> AgentLoop:
    """The loop of this name: of the user's file, else a registered one."""
    if name not in loops:
        if AGENT_LOOPS.get(name) is None:
            raise ConfigError(unknown_choice(AGENT_LOOPS.key, name, sorted({*AGENT_LOOPS.built_in, *loops})))
        return LOOPS.get(name)(context)
    settings = dict(loops[name])
    target = settings.pop("_target_")
    try:
        made = import_named(target)(context, **settings)
    except Exception as error:  # it is the user's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{LOOPS_KEY}: the loop {name} can't be made of _target_={target}: {reason}") from error
    if not isinstance(made, AgentLoop):
        raise ConfigError(f"{LOOPS_KEY}: _target_={target} of the loop {name} is no AgentLoop; derive it from that.")
    return made


def make_context(
    template: ChatTemplate, multi_turn: MultiTurnConfig, *, prompt_tokens: int, response_tokens: int
) -> AgentContext:
    """What the loops of a run share."""
    limits = ConversationLimits(
        prompt_tokens,
        response_tokens,
        turn_tokens=multi_turn.max_tokens_per_turn,
        assistant_turns=multi_turn.max_assistant_turns,
        user_turns=multi_turn.max_user_turns,
    )
    tools = Toolbox(
        read_tools(multi_turn.tool_config_path),
        max_characters=multi_turn.max_tool_response_length,
        side=multi_turn.tool_response_truncate_side,
    )
    return AgentContext(template, limits, tools, ToolFormat.named(multi_turn.format), multi_turn.max_parallel_calls)


class Runner:
    """Has conversations by the loops of a run."""

    def __init__(self, agent: AgentConfig, context: AgentContext) -> None:
        self._context = context
        self._timeout_seconds = agent.timeout_seconds
        self._default = agent.default_agent_loop
        self._listed = read_loops(agent.agent_loop_config_path)
        self._loops: dict[str, AgentLoop] = {}
        self._loop_named(self._default)

    def check(self, names: Iterable[object]) -> None:
        """Raise a ConfigError for a loop that a row names and that can't be made; others have the default."""
        for name in sorted({str(name) for name in names if name}):
            self._loop_named(name)

    def _loop_named(self, name: str) -> AgentLoop:
        if name not in self._loops:
            self._loops[name] = make_loop(name, self._listed, self._context)
        return self._loops[name]

    async def run(self, jobs: Sequence[Job], link: EngineLink) -> list[Ended]:
        """All of these conversations, in their order, over a connected link."""
        try:
            tasks = [asyncio.create_task(self._ended(job, link)) for job in jobs]
            asyncio.get_running_loop().call_soon(link.begin)
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            await link.close()

    async def stream(self, job: Job, link: EngineLink) -> Ended:
        """A conversation of a session that goes on behind it."""
        ended = await self._ended(job, link)
        ended.name = job.name
        return ended

    @asynccontextmanager
    async def _deadline(self, link: EngineLink) -> AsyncIterator[None]:
        """The time of a conversation: it runs while the rollout samples for this step, which may not have begun."""
        async with asyncio.timeout(None) as deadline:

            async def start() -> None:
                await link.has_begun()
                deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_seconds)

            starting = asyncio.create_task(start())
            try:
                yield
            finally:
                starting.cancel()

    async def _ended(self, job: Job, link: EngineLink) -> Ended:
        """A conversation to its end, however that comes; only what concerns all of them is raised."""
        begun: list[Conversation] = []
        turn_numbers: Counter[int] = Counter()

        async def generate(
            conversation: Conversation, max_tokens: int | None = None, choices: Choices | None = None
        ) -> Turn | None:
            if not any(conversation is known for known in begun):
                begun.append(conversation)
            if conversation.room < 1:
                if not conversation.ended_by:
                    conversation.end("response_length")
                return None
            asked = choices or Choices()
            if len(asked.watches) == 1:  # at once, so that the first turns of a step are asked for together
                return conversation.add_turn(await one_turn(conversation, max_tokens, asked, 0))
            turns = (one_turn(conversation, max_tokens, asked, place) for place in range(len(asked.watches)))
            return conversation.add_choices(await asyncio.gather(*turns))[-1]

        def one_turn(
            conversation: Conversation, max_tokens: int | None, asked: Choices, place: int
        ) -> Awaitable[Sampled]:
            number = turn_numbers[0]
            turn_numbers[0] += 1
            own, watch = turn_seed(job.seed, number), asked.watches[place]
            wanted = Wanted(
                f"{session_name(job.order)}-{number}",
                job.order,
                conversation.context,
                min(conversation.room, max_tokens or conversation.room),
                own if asked.seed is None else asked_seed(job.seed, asked.seed, place),
                is_watched=watch is not None,
            )
            return link.sample(job.rank, wanted, watch)

        problem = ""
        try:
            request = AgentRequest(job.row, job.prompt_ids, job.seed, self._context)
            async with self._deadline(link):
                conversation = await self._loop_named(job.row.get("agent_name") or self._default).run(request, generate)
            conversation.end()
            if not conversation.rows:
                conversation.rows.append(ConversationRow(job.prompt_ids))
            return Ended(
                job.order,
                conversation.rows,
                conversation.ended_by,
                conversation.turns,
                conversation.counts,
                conversation.chat,
            )
        except (LinkError, ConfigError):
            raise
        except TimeoutError as error:
            problem = str(error) or "a deadline passed"
        except (PacelineError, Exception) as error:  # it is the user's code
            problem = f"{type(error).__name__}: {error}"
            logger.debug("a conversation failed", exc_info=True)
        # Nothing of it trains: what broke it says nothing about what the model did.
        turns = begun[0].turns if begun else []
        counts = begun[0].counts if begun else {}
        return Ended(job.order, [ConversationRow(job.prompt_ids)], FAILED, turns, counts, problem=problem)


def session_name(order: int) -> str:
    """Of a conversation in its session, for the ids of its requests."""
    return f"conversation-{order}"


def turn_seed(seed: int, number: int) -> int:
    """The seed of a conversation's turn; that of the first one is the response's own, as without agents."""
    return seed if number == 0 else _seed_of(seed, number)


def asked_seed(seed: int, asked: int, choice: int) -> int:
    """The seed of an answer for which a program asks for one: its own in each conversation, so that responses to the
    same prompt differ."""
    return _seed_of(seed, 0, asked % 2**64, choice)


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1))
