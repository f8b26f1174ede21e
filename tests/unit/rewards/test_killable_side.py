"""What runs in a process that can be killed: awaitables together, and a pool whose calls cost each other nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

from paceline.rewards.killable import FunctionPool

POOLED = """
import os


def make():
    server = os.getpid()

    def call(what):
        while what == "hang":
            pass
        if what == "memory":
            return len(bytearray(1 << 40))
        if what == "exit":
            os._exit(3)
        return os.getppid() == server

    return call
"""


def test_in_a_pool_a_call_that_is_killed_costs_no_other_one_anything(tmp_path: Path) -> None:
    path = tmp_path / "pooled.py"
    path.write_text(POOLED)
    pool = FunctionPool(pickle.dumps(("maker", path, "make")), memory_bytes=1 << 30, variables={})
    try:
        texts = ("a", "hang", "memory", "exit", "b")
        first, hung, too_large, ended, last = pool.call_all([((text,), {}) for text in texts], timeout_seconds=1.0)
    finally:
        pool.close()
    assert first is last is True
    assert isinstance(hung, TimeoutError)
    assert isinstance(too_large, MemoryError)
    assert str(ended) == "the grading process ended with exit code 3"
