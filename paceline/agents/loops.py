"""Agent loops: what happens in a conversation between the turns of the model.

A loop of your own is a class of this form, in the list of `agent_loop_config_path`:

    class Twice(AgentLoop):
        async def run(self, request, generate):
            conversation = request.begin()
            while await generate(conversation) and conversation.observe([{"role": "user", "content": "Again."}]):
                pass
            return conversation
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.agents.conversation import Conversation, ConversationLimits, Turn
from paceline.agents.link import Watch
from paceline.agents.parsers import ToolFormat
from paceline.agents.template import ChatTemplate, Message
from paceline.agents.tools import Toolbox
from paceline.catalog import AGENT_LOOPS, NameEntry, Registry


@dataclass(frozen=True)
class Choices:
    """Several answers to the same chat, or one that somebody looks at while it is sampled."""

    watches: Sequence[Watch | None] = (None,)
    """One for each answer: who is told of its tokens."""
    seed: int | None = None
    """Equal ones give equal answers to an equal chat of this conversation; None: each answer has its own."""


class Generate(Protocol):
    """Samples the model's next turn, of at most `max_tokens`, and adds it to the conversation.

    With `choices` there may be several, see `Conversation.add_choices`; the last one is given. None where a limit
    leaves no room for one.
    """

    def __call__(
        self, conversation: Conversation, max_tokens: int | None = None, choices: Choices | None = None
    ) -> Awaitable[Turn | None]: ...


@dataclass(frozen=True)
class AgentContext:
    """What the loops of a process share."""

    template: ChatTemplate
    limits: ConversationLimits
    tools: Toolbox
    tool_format: ToolFormat
    max_parallel_calls: int


@dataclass(frozen=True)
class AgentRequest:
    """A conversation that is wanted."""

    row: Mapping[str, Any]
    """The columns of the prompt in the data files, with the chat as `raw_prompt`."""
    prompt_ids: list[int]
    """The tokens of that chat, with the tools that all rows have."""
    seed: int
    context: AgentContext

    def begin(
        self, messages: Sequence[Message] | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Conversation:
        """The conversation with the row's chat, or with messages or tools of its own."""
        template, limits = self.context.template, self.context.limits
        common = self.context.tools.of({}).schemas
        chat = self.row.get("raw_prompt", "") if messages is None else messages
        if messages is None and (tools is None or tools == common):
            return Conversation(template, limits, chat, self.prompt_ids, common if tools is None else tools)
        ids = template.encode(template.render(chat, tools or ()))
        return Conversation(template, limits, chat, ids, tools or ())


class AgentLoop(ABC):
    """One kind of conversation. An object serves many at the same time: what belongs to one stays in `run`.

    The constructor gets the context, and by keyword what its entry in `agent_loop_config_path` has besides.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    @abstractmethod
    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        """Have the conversation. It must not block: what takes time is awaited."""


LOOPS: Registry[type[AgentLoop], NameEntry] = Registry(AGENT_LOOPS)


def register_agent_loop(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Decorator: make a loop known under a name, for `default_agent_loop` and the column `agent_name`."""
    return LOOPS.register(name, None if name in AGENT_LOOPS.built_in else NameEntry())


@register_agent_loop("single_turn_agent")
class SingleTurnLoop(AgentLoop):
    """One prompt, one response."""

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        conversation = request.begin()
        await generate(conversation)
        return conversation


@register_agent_loop("tool_agent")
class ToolLoop(AgentLoop):
    """The model calls tools, in the format of `multi_turn.format`, until a turn calls none."""

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        tools = self.context.tools.of(request.row)
        conversation = request.begin(tools=tools.schemas)
        try:
            while (turn := await generate(conversation)) is not None:
                calls = self.context.tool_format.calls(turn.text)
                if not calls:
                    break
                most = self.context.max_parallel_calls
                conversation.count("dropped_calls", max(0, len(calls) - most))
                answers = await asyncio.gather(*(tools.call(call, conversation) for call in calls[:most]))
                conversation.reward(sum(answer.reward for answer in answers))
                if not conversation.observe([{"role": "tool", "content": answer.text} for answer in answers]):
                    break
        finally:
            await tools.close()
        return conversation
