"""An agent process's connections to the rollout: turns are asked for, and awaited, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.agents.conversation import Sampled
from paceline.agents.wire import LONGEST_LINE, Engines, Wanted, line
from paceline.errors import PacelineError

CONNECT_SECONDS = 60.0
Watch = Callable[[int, float], bool]
"""Is told of each sampled token but the end of the sequence, and its log-prob. True: this one is the last."""


@dataclass
class _Awaited:
    """A turn that is being sampled, as far as it came."""

    answer: asyncio.Future[Sampled]
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> bool:
        """Show these tokens. True if the turn is over with one of them, whatever was sampled behind it."""
        assert self.watch is not None
        for token_id, log_prob, version in zip(token_ids, log_probs, versions, strict=True):
            self.token_ids.append(token_id)
            self.log_probs.append(log_prob)
            self.versions.append(version)
            if self.watch(token_id, log_prob):
                own = (self.token_ids, self.log_probs, False)
                self.answer.set_result(Sampled(*own, is_stopped=True, versions=self.versions))
                return True
        return False

    def end(self, sampled: Sampled) -> None:
        if self.watch is not None:
            known, last = len(self.token_ids), len(sampled.token_ids) - sampled.finished_by_eos
            if self.take(sampled.token_ids[known:last], sampled.log_probs[known:last], sampled.versions[known:last]):
                return
        self.answer.set_result(sampled)


class EngineLink:
    """One session: the conversations of one step. What is asked for in one go of the event loop is sent together."""

    def __init__(self, session: int, agent: int) -> None:
        self._session, self._agent = session, agent
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []
        self._outgoing: dict[int, list[Wanted]] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._began = asyncio.Event()
        self._is_closing = False
        self._problem = ""

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

    async def has_begun(self) -> None:
        """Wait until a rollout samples for this session."""
        await self._began.wait()

    async def sample(self, rank: int, wanted: Wanted, watch: Watch | None = None) -> Sampled:
        """The model's turn; with `watch`, `wanted.is_watched` must be set."""
        if self._problem:
            raise LinkError(self._problem)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.setdefault(rank, []).append(wanted)
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._awaited[wanted.id] = _Awaited(answer, watch)
        try:
            sampled = await answer
        except asyncio.CancelledError:
            self._take_back(rank, wanted)
            raise
        finally:
            del self._awaited[wanted.id]
        if sampled.is_stopped:
            self._take_back(rank, wanted)
        return sampled

    def say_over(self, rank: int, name: str) -> None:
        """A conversation of a stream has ended; whoever samples may have waited for it."""
        self._send(rank, {"over": [name]})

    def _take_back(self, rank: int, wanted: Wanted) -> None:
        """Nobody waits for this turn any more."""
        if wanted in self._outgoing.get(rank, ()):
            self._outgoing[rank].remove(wanted)
        else:
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
                self._began.set()
                for name, token_ids, log_probs, version in message.get("sampled", ()):
                    if (awaited := self._open(name)) is not None:
                        awaited.take(token_ids, log_probs, [version] * len(token_ids))
                for name, token_ids, log_probs, finished_by_eos, versions in message.get("ended", ()):
                    if (awaited := self._open(name)) is not None:
                        awaited.end(Sampled(token_ids, log_probs, finished_by_eos, versions=versions))
        except (OSError, ValueError) as error:
            problem = f"{problem}: {error}"
        if not self._is_closing:
            self._fail(problem)

    def _open(self, name: str) -> _Awaited | None:
        """A turn that somebody waits for."""
        awaited = self._awaited.get(name)
        return None if awaited is None or awaited.answer.done() else awaited

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self._began.set()
        for awaited in self._awaited.values():
            if not awaited.answer.done():
                awaited.answer.set_exception(LinkError(problem))

    async def close(self) -> None:
        """No more is wanted."""
        self._is_closing = True
        self._fail("the session has ended")
        for rank, writer in enumerate(self._writers):
            self._send(rank, {"done": True})
            writer.close()
        for reader in self._readers:
            reader.cancel()


class LinkError(PacelineError):
    """The rollout can't be reached any more: no conversation can go on."""
