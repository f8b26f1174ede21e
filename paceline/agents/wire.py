"""What agent processes and rollout processes say to each other: lines of JSON over a connection that began with a key.

An agent may submit requests, abort them, and say that it needs no more; answers come as responses end. No other call
reaches a rollout this way, so nothing here depends on an order of calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

LONGEST_LINE = 256 * 2**20


@dataclass(frozen=True)
class Engines:
    """Where the rollout's processes listen, by rank, and the key that opens a connection."""

    addresses: tuple[tuple[str, int], ...]
    key: str


@dataclass(frozen=True)
class Wanted:
    """One turn that is wanted. `order` is the place of its conversation in the step."""

    id: str
    order: int
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    sampling: dict[str, Any] | None = None
    """How its tokens are chosen, where that is not as for all."""
    is_watched: bool = False
    """Its tokens are sent as they are sampled."""


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
