"""Heartbeats: each worker process writes a line to Ray's key-value store every second, also while a call runs."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass

import psutil
import ray

from paceline.private_apis.ray_private import delete_texts, get_text, node_memory, put_text

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_beating: set[str] = set()
SHORT_SHARE = 0.1
"""Memory is short when less than this share of a node's is free: a second later it may all be gone."""


@dataclass(frozen=True)
class Place:
    """Where a process runs, or ran."""

    node_id: str
    node_ip: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node_ip}"


@dataclass(frozen=True)
class Beat:
    """What a process last reported of itself. Memory in bytes; a container's limit counts as the node's memory."""

    time: float
    resident: int
    node_free: int
    node_total: int

    @classmethod
    def now(cls) -> Beat:
        return cls(time.time(), psutil.Process().memory_info().rss, *node_memory())

    @property
    def is_memory_short(self) -> bool:
        return self.node_free < SHORT_SHARE * self.node_total

    def __str__(self) -> str:
        """
        >>> str(Beat(0.0, 3_200_000_000, 1_100_000_000, 24_000_000_000))[-43:]
        ': 3.2 GB resident, node 1.1 of 24.0 GB free'
        """
        seconds = max(0.0, time.time() - self.time)
        free, total = self.node_free / 1e9, self.node_total / 1e9
        memory = f"{self.resident / 1e9:.1f} GB resident, node {free:.1f} of {total:.1f} GB free"
        return f"last seen {seconds:.0f} s before: {memory}"


def start_heartbeat(key: str) -> None:
    """Beat from a thread of its own until the process ends. A second time does nothing."""
    if key in _beating:
        return
    _beating.add(key)
    threading.Thread(target=_beat, args=(key,), name="heartbeat", daemon=True).start()


def beat_and_locate(actor: object) -> Place:
    """For `__ray_call__` of any actor: start its heartbeat and return where it runs."""
    del actor
    start_actor_heartbeat()
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())


def start_actor_heartbeat() -> None:
    """Start the heartbeat of the actor in this process, under the actor's id. Other processes are not watched."""
    if ray.is_initialized() and (actor_id := ray.get_runtime_context().get_actor_id()):
        start_heartbeat(actor_id)


def forget_beats(prefix: str) -> None:
    """Delete the beats of all keys with this prefix."""
    delete_texts(prefix)


def read_beat(key: str) -> Beat | None:
    """The last beat of a process; None before its first."""
    text = get_text(key)
    return Beat(**json.loads(text)) if text else None


def _beat(key: str) -> None:
    while True:
        try:
            put_text(key, json.dumps(asdict(Beat.now())))
        except Exception:
            logger.warning("heartbeat %s could not be written", key, exc_info=True)
        time.sleep(BEAT_SECONDS)
