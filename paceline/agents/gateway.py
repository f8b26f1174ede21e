"""A gateway that speaks OpenAI's protocol, so that a program which knows nothing of paceline has the conversation.

    - name: program
      _target_: paceline.agents.gateway.ProgramLoop
      command: [python, my_program.py]

For each conversation the program is started with OPENAI_BASE_URL and OPENAI_API_KEY, and with the row as JSON on its
standard input. Its requests are turns of the model; their ids and log-probs are kept here. If the last line that it
prints is `{"reward": 1.0}`, the last turn earned that.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.agents.choice_reader import ChoiceReader
from paceline.agents.conversation import Conversation
from paceline.agents.loops import AgentContext, AgentLoop, AgentRequest, Choices, Generate
from paceline.agents.openai_messages import BadRequestError, Choice, KnownMessage, WantedCompletion, known_message
from paceline.agents.openai_server import OpenAIServer
from paceline.agents.parsers import ToolFormat
from paceline.agents.template import ChatTemplate
from paceline.errors import PacelineError

END_SECONDS = 5.0
MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept, the last ones."""


@dataclass
class ServedProgram:
    """A conversation that a program has."""

    request: AgentRequest
    generate: Generate
    conversation: Conversation
    shown: list[KnownMessage] | None = None
    """The chat that the program sent last, as it knows it; None: it sent none, or a plain text."""
    said: list[KnownMessage] = field(default_factory=list)
    """What it was answered, one or several."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def template(self) -> ChatTemplate:
        return self.request.context.template

    @property
    def tool_format(self) -> ToolFormat:
        return self.request.context.tool_format

    async def answer(self, asked: WantedCompletion, readers: Sequence[ChoiceReader]) -> tuple[list[Choice], int]:
        """One more turn of the model, or several to choose from, and how many tokens they were sampled after."""
        async with self.lock:
            conversation = self.conversation
            may_go_on = self._continue(asked) if asked.is_chat else conversation.restart(asked.prompt)
            self.shown, self.said = (asked.known if asked.is_chat else None), []
            if not may_go_on or not conversation.room:
                raise BadRequestError(f"the conversation is over: {conversation.ended_by or 'response_length'}")
            prompt_tokens = len(conversation.context)
            turn = await self.generate(conversation, asked.max_tokens, Choices(readers, asked.seed))
            assert turn is not None  # there was room
            first = len(conversation.turns) - len(readers)
            choices = []
            for place, reader in enumerate(readers):
                row, turn = conversation.rows[place - len(readers)], conversation.turns[first + place]
                reader.end(last=(row.response_ids[-1], row.log_probs[-1]) if turn.finished_by_eos else None)
                calls = self.tool_format.calls(turn.text) if asked.tools else []
                choices.append(Choice.of(reader, calls[:1] if asked.one_call else calls, str(first + place)))
            self.said = [known_message(choice.message) for choice in choices]
            return choices, prompt_tokens

    def _continue(self, asked: WantedCompletion) -> bool:
        """Bring the conversation to where the program has it; False if it may not go on."""
        if self.shown is not None and asked.tools == list(self.conversation.tools):
            if asked.known == self.shown and not self.said:  # it asks again, after it had hung up
                return not self.conversation.ended_by
            for place, message in enumerate(self.said):
                known = [*self.shown, message]
                if asked.known[: len(known)] == known and len(asked.known) > len(known):
                    self.conversation.go_on_with(place)
                    return self.conversation.observe(asked.messages[len(known) :])
        return self.conversation.restart(asked.messages, asked.tools)


class Gateway:
    """The server of a process; each conversation has a key of its own."""

    def __init__(self) -> None:
        self._served: dict[str, ServedProgram] = {}
        self._server = OpenAIServer(self._served.get)
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def serving(self, served: ServedProgram) -> AsyncIterator[tuple[str, str]]:
        """Address and key of a conversation."""
        async with self._starting:
            if not self._url:
                self._url = await self._server.start()
        key = f"paceline-{secrets.token_hex(16)}"
        self._served[key] = served
        try:
            yield self._url, key
        finally:
            del self._served[key]


class ProgramLoop(AgentLoop):
    """Lets a program have the conversation. One that fails, or takes longer than `timeout_seconds`, is left out."""

    def __init__(
        self, context: AgentContext, *, command: Sequence[str], timeout_seconds: float = 300.0, max_concurrent: int = 8
    ) -> None:
        super().__init__(context)
        self._command = [str(part) for part in command]
        self._timeout_seconds = timeout_seconds
        self._places = asyncio.Semaphore(max_concurrent)
        self._gateway = Gateway()

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        conversation = request.begin()
        served = ServedProgram(request, generate, conversation)
        async with self._places, self._gateway.serving(served) as (url, key):
            code, output, said = await self._program(request, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key})
        if code and not conversation.ended_by:  # a program may well fail when it is told that it may have no turn
            raise PacelineError(f"the program ended with exit code {code}: {said.strip()[-500:]}")
        reward = _reward(output)
        if reward is not None and conversation.turns:
            conversation.reward(reward)
        return conversation

    async def _program(self, request: AgentRequest, variables: Mapping[str, str]) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                process.stdin.write(json.dumps(dict(request.row), default=str).encode())
                process.stdin.close()
                output, said = await asyncio.gather(_last_of(process.stdout), _last_of(process.stderr))
                return await process.wait(), output, said
        except TimeoutError as error:
            raise PacelineError(f"the program did not end within {self._timeout_seconds:g} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, 9)
                await asyncio.wait_for(process.wait(), END_SECONDS)


async def _last_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-MOST_OUTPUT:]
    return kept.decode(errors="replace")


def _reward(output: str) -> float | None:
    """
    >>> _reward('hello\\n{"reward": 0.5}\\n'), _reward("hello")
    (0.5, None)
    """
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    value = said.get("reward") if isinstance(said, dict) else None
    return float(value) if isinstance(value, int | float) else None
