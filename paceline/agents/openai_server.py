"""The HTTP server of OpenAI's protocol, on the loopback address: for programs in training, and for trained models.

Who answers is found by the key of a request. Tokens of a streamed answer are sent as they are sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from paceline.agents.choice_reader import ChoiceReader
from paceline.agents.openai_messages import (
    BadRequestError,
    Bodies,
    BusyError,
    Choice,
    WantedCompletion,
    read_request,
)
from paceline.agents.parsers import ToolFormat
from paceline.agents.template import ChatTemplate
from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LARGEST_BODY = 64 << 20
END_SECONDS = 2.0
"""How long requests under way may take when the server ends."""


class Answering(Protocol):
    """Who has the model's answers to a client."""

    @property
    def template(self) -> ChatTemplate: ...

    @property
    def tool_format(self) -> ToolFormat: ...

    async def answer(self, asked: WantedCompletion, readers: Sequence[ChoiceReader]) -> tuple[list[Choice], int]:
        """The answers, each read by its reader while it is sampled, and how many tokens they were sampled after."""
        ...


class OpenAIServer:
    """Answers `/v1/chat/completions`, `/v1/completions` and `/v1/models`, for those that `of_key` knows."""

    def __init__(self, of_key: Callable[[str], Answering | None], model: str = "policy") -> None:
        self._of_key = of_key
        self._model = model
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listen on a port, any free one without; gives the base URL."""
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_post("/v1/chat/completions", self._completion)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        # Who hangs up needs no more: its turn is taken back.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=END_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, port).start()
        host, used = self._runner.addresses[0][:2]
        return f"http://{host}:{used}/v1"

    async def close(self) -> None:
        """No more requests; those under way end."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _answering(self, request: web.Request) -> Answering | None:
        return self._of_key(request.headers.get("Authorization", "").removeprefix("Bearer "))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._answering(request) is None:
            return _refusal(401, "this key is not known")
        models = [{"id": self._model, "object": "model", "created": 0, "owned_by": "paceline"}]
        return web.json_response({"object": "list", "data": models})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        answering = self._answering(request)
        if answering is None:
            return _refusal(401, "this key is not known")
        try:
            asked = read_request(await request.json(), is_chat=request.path.endswith("/chat/completions"))
            return await self._answered(request, answering, asked)
        except (BadRequestError, ValueError) as error:  # DataError, too
            return _refusal(400, str(error))
        except BusyError as error:
            return _refusal(429, str(error))
        except PacelineError as error:
            return _refusal(500, f"{type(error).__name__}: {error}")

    async def _answered(
        self, request: web.Request, answering: Answering, asked: WantedCompletion
    ) -> web.StreamResponse:
        news = asyncio.Event()
        opening = answering.tool_format.opening if asked.tools else None
        readers = [
            ChoiceReader(answering.template.decode, asked.stop, opening=opening, when_new=news.set)
            for _ in range(asked.n)
        ]
        bodies = Bodies(f"turn-{secrets.token_hex(8)}", int(time.time()), asked)
        task = asyncio.create_task(answering.answer(asked, readers))
        try:
            if not asked.stream:
                return web.json_response(bodies.whole(*await task))
            return await _streamed(request, bodies, readers, task, news)
        finally:
            task.cancel()


async def _streamed(
    request: web.Request,
    bodies: Bodies,
    readers: Sequence[ChoiceReader],
    task: asyncio.Task[tuple[list[Choice], int]],
    news: asyncio.Event,
) -> web.StreamResponse:
    """Server-sent events, as tokens come. What is refused before the first of them is raised."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    task.add_done_callback(lambda _: news.set())
    await news.wait()
    if task.done():
        await task
    await response.prepare(request)

    async def send(chunks: Iterable[Mapping[str, Any]]) -> None:
        for chunk in chunks:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

    for place in range(len(readers)):
        await send(bodies.role(place))
    while not task.done():
        news.clear()
        for place, reader in enumerate(readers):
            await send(bodies.piece(place, *reader.take()))
        if not task.done():
            await news.wait()
    try:
        choices, prompt_tokens = await task
    except PacelineError as error:  # the status was sent
        await send([_error(f"{type(error).__name__}: {error}")])
        return response
    for place, choice in enumerate(choices):
        await send(bodies.last(place, choice))
    await send(bodies.usage(choices, prompt_tokens))
    await response.write(b"data: [DONE]\n\n")
    return response


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response(_error(message), status=status)
