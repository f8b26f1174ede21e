"""Where agent processes leave their requests in a rollout's process, and from where they get their answers.

Threads read what comes and put it into a queue; nothing is sampled by them. A call of the driver serves a session: the
conversations of one step. So weights change between sessions only, and the order of calls is the driver's alone.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from paceline.agents.wire import LONGEST_LINE, Wanted, line
from paceline.errors import PacelineError
from paceline.rollout import Completion, Request, RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)

KEY_SECONDS = 10.0
"""For the first line of a connection."""
LONGEST_KEY_LINE = 4096
NOTICE_SECONDS = 30.0


@dataclass(eq=False)
class Peer:
    """A connection of an agent process that showed the key."""

    agent: int
    session: int
    connection: socket.socket

    def send(self, message: dict[str, Any]) -> None:
        """An agent that is gone misses nothing: the driver hears of its end from Ray."""
        try:
            self.connection.sendall(line(message))
        except OSError as error:
            logger.debug("agent %d is gone: %s", self.agent, error)


class Mailbox:
    """Listens on one address of this machine, for those who have the key."""

    def __init__(self, host: str, key: str) -> None:
        self.key = key
        self._inbox: queue.Queue[tuple[Peer, dict[str, Any]]] = queue.Queue()
        self._early: list[tuple[Peer, dict[str, Any]]] = []
        """Of sessions that have not begun: an agent may be done with one while others are not."""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="mailbox", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), name="mailbox peer", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                peer = self._peer(connection, stream)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("a connection to the rollout was refused: %s", error)
                return
            try:
                while content := stream.readline(LONGEST_LINE):
                    self._inbox.put((peer, json.loads(content)))
            except (OSError, ValueError) as error:
                logger.debug("the connection of agent %d ended: %s", peer.agent, error)
            self._inbox.put((peer, {"done": True}))

    def _peer(self, connection: socket.socket, stream: BufferedReader) -> Peer:
        """Who it is, by the first line; raises for one that has not the key."""
        connection.settimeout(KEY_SECONDS)
        hello = json.loads(stream.readline(LONGEST_KEY_LINE))
        if not hmac.compare_digest(str(hello.get("key")).encode(), self.key.encode()):
            raise ValueError("the key is another")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Peer(int(hello["agent"]), int(hello["session"]), connection)

    def close(self) -> None:
        self._listener.close()

    def serve(self, engine: RolloutEngine, sampling: dict[str, Any], session: int, num_agents: int) -> None:
        """Sample what the agents of a session ask for, until all have said that they need no more.

        The first requests of all agents are admitted together, in the order of their conversations: so what is decoded
        together first does not depend on which agent was faster.
        """
        early, self._early = self._early, []
        for item in early:
            self._inbox.put(item)
        serving = _Session(self._inbox, self._early, engine, sampling, session, num_agents)
        try:
            serving.run()
        except BaseException as error:
            for peer in serving.peers:
                peer.send({"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            serving.drop_all()


class _Session:
    def __init__(
        self,
        inbox: queue.Queue[tuple[Peer, dict[str, Any]]],
        early: list[tuple[Peer, dict[str, Any]]],
        engine: RolloutEngine,
        sampling: dict[str, Any],
        session: int,
        num_agents: int,
    ) -> None:
        self._inbox, self._early = inbox, early
        self._engine, self._sampling, self._session = engine, sampling, session
        self._not_done = set(range(num_agents))
        self._silent = set(range(num_agents))
        """Agents from which no word came yet."""
        self._first: list[tuple[int, Request]] = []
        self.peers: set[Peer] = set()
        self._peer_of: dict[str, Peer] = {}
        self._watched: dict[str, tuple[Request, int]] = {}
        """Requests whose tokens are sent as they come, and how many were sent."""
        self._is_admitted = False

    def run(self) -> None:
        while self._silent:
            self._take(block=True)
        self._engine.submit([request for _, request in sorted(self._first, key=lambda pair: pair[0])])
        self._is_admitted = True
        for peer in self.peers:
            peer.send({})  # it has begun
        while self._not_done:
            self._take(block=not self._engine.has_work)
            if self._engine.has_work:
                self._engine.step()
                self._answer()

    def _take(self, *, block: bool) -> None:
        """What lies in the mailbox; with `block` at least one message."""
        while True:
            try:
                peer, message = self._inbox.get(block=block, timeout=NOTICE_SECONDS)
            except queue.Empty:
                if not block:
                    return
                logger.debug("waiting for agents %s", sorted(self._not_done))
                continue
            self._act_on(peer, message)
            block = False

    def _act_on(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.session > self._session:
            self._early.append((peer, message))
        if peer.session != self._session:
            return
        self.peers.add(peer)
        if message.get("done"):
            self._leave(peer)
        elif "abort" in message:
            self._forget([name for name in message["abort"] if self._peer_of.get(name) is peer])
        else:
            self._submit(peer, [Wanted(**wanted) for wanted in message["submit"]])

    def _submit(self, peer: Peer, wanted: list[Wanted]) -> None:
        requests = [
            Request(
                one.id, one.prompt_ids, SamplingParams(one.max_tokens, **(one.sampling or self._sampling)), one.seed
            )
            for one in wanted
        ]
        if known := [request.id for request in requests if request.id in self._peer_of]:
            raise PacelineError(f"agent {peer.agent} asked twice for {known[:10]}.")
        self._peer_of |= {one.id: peer for one in wanted}
        pairs = zip(wanted, requests, strict=True)
        self._watched |= {one.id: (request, 0) for one, request in pairs if one.is_watched}
        if not self._is_admitted:
            self._first += [(one.order, request) for one, request in zip(wanted, requests, strict=True)]
            self._silent.discard(peer.agent)
        elif requests:
            self._engine.submit(requests)

    def _answer(self) -> None:
        answers: dict[Peer, dict[str, list[list[object]]]] = {}
        for name, completion in self._engine.collect():
            self._watched.pop(str(name), None)
            answer = answers.setdefault(self._peer_of.pop(str(name)), {})
            answer.setdefault("ended", []).append(_ended(str(name), completion))
        for name, (request, known) in self._watched.items():
            sampled = self._engine.sampled_so_far(request)
            if (count := len(sampled.token_ids)) > known:
                self._watched[name] = (request, count)
                answer = answers.setdefault(self._peer_of[name], {})
                answer.setdefault("sampled", []).append([name, sampled.token_ids[known:], sampled.log_probs[known:]])
        for peer, answer in answers.items():
            peer.send(answer)

    def _leave(self, peer: Peer) -> None:
        """An agent that has said so, or that is gone, needs no more."""
        self._not_done.discard(peer.agent)
        self._silent.discard(peer.agent)
        self._forget([name for name, owner in self._peer_of.items() if owner is peer])

    def _forget(self, names: list[str]) -> None:
        """Requests that nobody waits for."""
        if self._is_admitted:
            self._engine.abort(list(names))
        else:
            self._first = [pair for pair in self._first if pair[1].id not in names]
        for name in names:
            del self._peer_of[name]
            self._watched.pop(name, None)

    def drop_all(self) -> None:
        """Nothing of a session outlives it. After an error the engine may have lost some already."""
        for name in list(self._peer_of):
            with suppress(PacelineError):
                self._forget([name])


def _ended(name: str, completion: Completion) -> list[object]:
    return [name, completion.token_ids, completion.log_probs, completion.finished_by_eos]
