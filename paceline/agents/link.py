"""An agent process's connections to the rollout: turns are asked for, and awaited, in one event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

from paceline.agents.conversation import Sampled
from paceline.agents.wire import LONGEST_LINE, Engines, Wanted, line
from paceline.errors import PacelineError

CONNECT_SECONDS = 60.0


class EngineLink:
    """One session: the conversations of one step. What is asked for in one go of the event loop is sent together."""

    def __init__(self, session: int, agent: int) -> None:
        self._session, self._agent = session, agent
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []
        self._outgoing: dict[int, list[Wanted]] = {}
        self._awaited: dict[str, asyncio.Future[Sampled]] = {}
        self._is_closing = False

    async def connect(self, engines: Engines) -> None:
        for host, port in engines.addresses:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
            self._writers.append(writer)
            self._send(len(self._writers) - 1, {"key": engines.key, "agent": self._agent, "session": self._session})
            self._readers.append(asyncio.create_task(self._read(reader, f"{host}:{port}")))

    def begin(self) -> None:
        """Send what was asked for until now, or that there is nothing yet: rollouts wait for all agents' first word."""
        for rank in range(len(self._writers)):
            self._outgoing.setdefault(rank, [])
        self._flush()

    async def sample(self, rank: int, wanted: Wanted) -> Sampled:
        """The model's turn."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.setdefault(rank, []).append(wanted)
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._awaited[wanted.id] = answer
        try:
            return await answer
        finally:
            if self._awaited.pop(wanted.id, None) is not None and answer.cancelled():
                self._send(rank, {"abort": [wanted.id]})

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for rank, wanted in outgoing.items():
            self._send(rank, {"submit": [asdict(one) for one in wanted]})

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        if not self._writers[rank].is_closing():
            self._writers[rank].write(line(message))

    async def _read(self, reader: asyncio.StreamReader, where: str) -> None:
        problem = f"the rollout at {where} closed its connection"
        try:
            while content := await reader.readline():
                message = json.loads(content)
                if "error" in message:
                    problem = f"the rollout at {where} failed: {message['error']}"
                    break
                for name, token_ids, log_probs, finished_by_eos in message["ended"]:
                    answer = self._awaited.get(name)
                    if answer is not None and not answer.done():
                        answer.set_result(Sampled(token_ids, log_probs, finished_by_eos))
        except (OSError, ValueError) as error:
            problem = f"{problem}: {error}"
        if not self._is_closing:
            self._fail(problem)

    def _fail(self, problem: str) -> None:
        for answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(LinkError(problem))

    async def close(self) -> None:
        """No more is wanted."""
        self._is_closing = True
        for rank, writer in enumerate(self._writers):
            self._send(rank, {"done": True})
            writer.close()
        for reader in self._readers:
            reader.cancel()


class LinkError(PacelineError):
    """The rollout can't be reached any more: no conversation can go on."""
