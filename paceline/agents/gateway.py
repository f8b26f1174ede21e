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
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.agents.conversation import Conversation, Turn
from paceline.agents.loops import AgentContext, AgentLoop, AgentRequest, Generate
from paceline.agents.openai_messages import BadRequestError, chat_answer, chunks, known_message, read_messages
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
END_SECONDS = 5.0
MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept, the last ones."""
REFUSED = ("stop", "response_format", "functions", "audio", "suffix")
"""Settings that would change what the model samples, or how it is read, in a way that is not here."""


@dataclass
class ServedProgram:
    """A conversation that a program has."""

    request: AgentRequest
    generate: Generate
    conversation: Conversation
    has_begun: bool = False
    shown: list[Any] = field(default_factory=list)
    """The chat as the program knows it: what it sent, and what it was given."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def chat(self, asked: Mapping[str, Any]) -> tuple[Turn, dict[str, Any]]:
        """One more turn of the model, and its message."""
        messages, tools = read_messages(asked), list(asked.get("tools") or ())
        known = [known_message(message) for message in asked["messages"]]
        new = known[len(self.shown) :]
        goes_on = self.has_begun and known[: len(self.shown)] == self.shown and tools == list(self.conversation.tools)
        if goes_on and new:
            may_go_on = self.conversation.observe(messages[len(self.shown) :])
        else:
            may_go_on = self.conversation.restart(messages, tools)
        self.has_begun = True
        turn = await self._turn(may_go_on, asked.get("max_completion_tokens") or asked.get("max_tokens"))
        calls = self.request.context.parser(turn.text) if tools else []
        message, finish = chat_answer(turn, calls, number=len(self.conversation.turns))
        self.shown = [*known, known_message(message)]
        return turn, {"message": message, "finish_reason": finish}

    async def complete(self, asked: Mapping[str, Any]) -> tuple[Turn, dict[str, Any]]:
        """A turn behind a plain text."""
        prompt = asked.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise BadRequestError("`prompt` must be a text")
        self.has_begun, self.shown = False, []
        turn = await self._turn(self.conversation.restart(prompt), asked.get("max_tokens"))
        return turn, {"text": turn.text, "finish_reason": "stop" if turn.finished_by_eos else "length"}

    async def _turn(self, may_go_on: bool, max_tokens: int | None) -> Turn:
        turn = await self.generate(self.conversation, max_tokens) if may_go_on else None
        if turn is None:
            raise BadRequestError(f"the conversation is over: {self.conversation.ended_by}")
        return turn

    @property
    def last_tokens(self) -> list[tuple[str, float]]:
        """Of the last turn: the text of each token, and its log-prob."""
        row, count = self.conversation.rows[-1], self.conversation.turns[-1].num_tokens
        decode = self.request.context.template.decode
        pairs = zip(row.response_ids[-count:], row.log_probs[-count:], strict=True)
        return [(decode([token]), log_prob) for token, log_prob in pairs]


class Gateway:
    """The server of a process, on the loopback address; each conversation has a key of its own."""

    def __init__(self) -> None:
        self._served: dict[str, ServedProgram] = {}
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def serving(self, served: ServedProgram) -> AsyncIterator[tuple[str, str]]:
        """Address and key of a conversation."""
        async with self._starting:
            if not self._url:
                self._url = await self._start()
        key = f"paceline-{secrets.token_hex(16)}"
        self._served[key] = served
        try:
            yield self._url, key
        finally:
            del self._served[key]

    async def _start(self) -> str:
        from aiohttp import web

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    def _of(self, request: web.Request) -> ServedProgram | None:
        return self._served.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if self._of(request) is None:
            return web.json_response(_error("this key is not known"), status=401)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        served = self._of(request)
        if served is None:
            return web.json_response(_error("this key is not known"), status=401)
        is_chat = request.path.endswith("/chat/completions")
        try:
            asked = await request.json()
            _check(asked)
            async with served.lock:
                turn, choice = await (served.chat(asked) if is_chat else served.complete(asked))
                tokens = served.last_tokens
        except (BadRequestError, ValueError) as error:
            return web.json_response(_error(str(error)), status=400)
        if asked.get("logprobs"):
            choice["logprobs"] = _log_probs(tokens, is_chat=is_chat)
        body = {
            "id": f"turn-{secrets.token_hex(8)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": asked.get("model") or "policy",
            "choices": [{"index": 0, **choice}],
            "usage": {"prompt_tokens": 0, "completion_tokens": turn.num_tokens, "total_tokens": turn.num_tokens},
        }
        if not asked.get("stream"):
            return web.json_response(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks(body):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _check(asked: object) -> None:
    if not isinstance(asked, dict):
        raise BadRequestError("the request must be an object")
    if (asked.get("n") or 1) != 1:
        raise BadRequestError("n must be 1: a conversation goes on with one answer")
    if wrong := [name for name in REFUSED if asked.get(name)]:
        raise BadRequestError(f"{', '.join(wrong)}: not supported here; leave it out")


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _log_probs(tokens: Sequence[tuple[str, float]], *, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"tokens": [text for text, _ in tokens], "token_logprobs": [log_prob for _, log_prob in tokens]}
    return {
        "content": [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in tokens
        ]
    }


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
