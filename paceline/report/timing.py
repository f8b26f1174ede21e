"""How long the named parts of a step take, as seen by whoever runs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the wall-clock seconds of named blocks.

    >>> timer = Timer()
    >>> with timer("gen"):
    ...     pass
    >>> list(timer.seconds)
    ['gen']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to `seconds[name]`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
