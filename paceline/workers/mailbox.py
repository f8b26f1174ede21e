"""Where agent processes leave their requests in a rollout's process, and from where they get their answers.

Threads read what comes and put it into a queue; nothing is sampled by them. `agent_sessions` says what becomes of it.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from paceline.agents.wire import LONGEST_LINE, line

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


Mail = tuple[Peer, dict[str, Any]]


class Mailbox:
    """Listens on one address of this machine, for those who have the key. `when_mail` is told when something came."""

    def __init__(self, host: str, key: str) -> None:
        self.key = key
        self.when_mail: Callable[[], None] = lambda: None
        self._inbox: queue.Queue[Mail] = queue.Queue()
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="mailbox", daemon=True).start()

    @property
    def has_mail(self) -> bool:
        return not self._inbox.empty()

    def take(self, *, block: bool) -> Iterator[Mail]:
        """What lies here; with `block` at least one message."""
        while True:
            try:
                yield self._inbox.get(block=block, timeout=NOTICE_SECONDS)
            except queue.Empty:
                if not block:
                    return
                logger.debug("waiting for agents")
                continue
            block = False

    def close(self) -> None:
        self._listener.close()

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
                    self._put(peer, json.loads(content))
            except (OSError, ValueError) as error:
                logger.debug("the connection of agent %d ended: %s", peer.agent, error)
            self._put(peer, {"done": True})

    def _put(self, peer: Peer, message: dict[str, Any]) -> None:
        self._inbox.put((peer, message))
        self.when_mail()

    def _peer(self, connection: socket.socket, stream: BufferedReader) -> Peer:
        """Who it is, by the first line; raises for one that has not the key."""
        connection.settimeout(KEY_SECONDS)
        hello = json.loads(stream.readline(LONGEST_KEY_LINE))
        if not hmac.compare_digest(str(hello.get("key")).encode(), self.key.encode()):
            raise ValueError("the key is another")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Peer(int(hello["agent"]), int(hello["session"]), connection)
