"""What is remembered of every call: who ran it, where, from when to when."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

call_tag: ContextVar[dict[str, Any]] = ContextVar("call_tag")
"""Set by the driver; every call issued under it carries a copy in its record. Example: `call_tag.set({"step": 3})`."""


@dataclass(frozen=True)
class CallRecord:
    """One finished call on one rank.

    >>> record = CallRecord("main", "trainer+scorer", "scorer", 1, 4711, "10.0.0.5", "score", 12.0, 12.5, {"step": 3})
    >>> record.end - record.start
    0.5
    """

    pool: str
    process_roles: str
    """All roles of the process, joined by +: with `pool` and `rank`, the name of the process."""
    role: str
    rank: int
    pid: int
    node: str
    method: str
    start: float
    """Seconds since the epoch, by the worker's clock, after its inputs had arrived."""
    end: float
    tag: dict[str, Any]
