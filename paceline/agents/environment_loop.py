"""An environment as the other side of a conversation, in the manner of gymnasium: `reset` and `step`.

    - name: guess
      _target_: paceline.agents.environment_loop.EnvironmentLoop
      environment: games.py:GuessTheNumber

in the list of `agent_loop_config_path`, and `default_agent_loop=guess` or a column `agent_name`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from paceline.agents.conversation import Conversation
from paceline.agents.loops import AgentContext, AgentLoop, AgentRequest, Generate
from paceline.agents.template import Message
from paceline.agents.tools import called
from paceline.errors import PacelineError
from paceline.external import import_named

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 1 << 20


class Environment(ABC):
    """What the model talks to; an object for each conversation. Methods may be async; plain ones run in threads."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """The chat that the model answers first. `row` is the prompt's in the data files."""

    @abstractmethod
    def step(self, text: str) -> tuple[str | list[Message], float, bool]:
        """After a turn of the model: what it reads next, what its turn earned, and whether that was the end."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The conversation is over."""


class EnvironmentLoop(AgentLoop):
    """Turns of the model against an environment of the class that `environment` names, with dots or as file.py:Class.

    A method that takes longer than `timeout_seconds`, says more than a conversation holds, or raises, ends its
    conversation, of which nothing trains; the others go on. `max_concurrent` methods run at the same time.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        environment: str,
        timeout_seconds: float = 30.0,
        max_concurrent: int = 64,
        **settings: Any,
    ) -> None:
        super().__init__(context)
        self._class = import_named(environment)
        self._timeout_seconds = timeout_seconds
        self._places = asyncio.Semaphore(max_concurrent)
        self._settings = settings
        self._class(**settings)  # what is wrong with it shows now

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        environment = self._class(**self._settings)
        try:
            messages = self._read(await self._asked(environment.reset, request.row, request.seed))
            conversation = request.begin(messages=messages)
            while (turn := await generate(conversation)) is not None:
                observation, reward, is_over = await self._asked(environment.step, turn.text)
                conversation.reward(float(reward))
                if is_over:
                    break
                if not conversation.observe(self._read(observation)):
                    break
        finally:
            await self._close(environment)
        return conversation

    def _read(self, said: str | list[Message]) -> list[Message]:
        """As messages; what is far longer than any conversation is not read at all, as that would take too long."""
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if (count := sum(len(message.get("content") or "") for message in messages)) > MOST_CHARACTERS:
            raise PacelineError(f"{self._class.__name__} said {count:,} characters; {MOST_CHARACTERS:,} are the most")
        return messages

    async def _asked(self, method: Callable[..., Any], *args: Any) -> Any:
        """What the environment says, in time."""
        deadline = asyncio.timeout(self._timeout_seconds)
        try:
            async with self._places, deadline:
                return await called(method, *args)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise PacelineError(
                f"{self._class.__name__}.{method.__name__} gave no answer within {self._timeout_seconds:g} s"
            ) from error

    async def _close(self, environment: Environment) -> None:
        try:
            await self._asked(environment.close)
        except Exception:  # it is the user's code, and the conversation has ended
            logger.warning("an environment could not be closed", exc_info=True)
