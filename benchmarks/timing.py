"""Several ways to do the same work, measured in turns, so that other work on the machine meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def take_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way; every second turn goes backwards, so that none always follows the same other."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in ways if turn % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name]()
            if turn:  # The first is for warming up.
                seconds[name].append(time.perf_counter() - start)
    return seconds
