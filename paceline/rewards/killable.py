"""Reward functions with a deadline: they run in a process of their own, which is killed when a call does not end.

Nothing less ends every function: one that is stuck in C code, such as a regular expression, hears of no exception. The
process is kept between batches, and with it what the function's file holds at module level.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.rewards import function_server
from paceline.rewards.function_server import AWAITING, Call, Outcome
from paceline.rewards.script import start_script

__all__ = ["FunctionProcess", "function_process"]

logger = logging.getLogger(__name__)

LOAD_SECONDS = 300.0
"""For starting Python and importing the function's file, which may read a model; at least the time of a call."""
GRACE_SECONDS = 2.0
"""What is awaitable is cancelled at its deadline; the process is killed if that does not help."""
MAX_LOST_IN_A_ROW = 3
"""Calls in a row that did not end by themselves, after which the rest of a batch is not tried."""


class FunctionProcess:
    """One function in one process, started at the first call. Safe to use from several threads and after a fork."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def call_all(self, calls: Sequence[Call], timeout_seconds: float) -> list[Any]:
        """A result for each call, each within the deadline; an exception stands for a failure."""
        results: dict[int, Any] = {}
        lost_in_a_row = 0
        with self._lock:
            while len(results) < len(calls):
                todo = [number for number in range(len(calls)) if number not in results]
                if lost_in_a_row == MAX_LOST_IN_A_ROW:
                    cause = results[todo[0] - 1]
                    problem = f"not tried, since {MAX_LOST_IN_A_ROW} calls in a row did not end by themselves"
                    return [results.get(number, type(cause)(f"{problem}: {cause}")) for number in range(len(calls))]
                before = len(results)
                failure, together = self._ask(calls, todo, timeout_seconds, results)
                if failure is not None:
                    self._stop()
                    lost = [number for number in todo if number not in results]
                    results |= dict.fromkeys(lost if together else lost[:1], failure)
                    lost_in_a_row = lost_in_a_row + 1 if len(results) == before + 1 else 1
        return [results[number] for number in range(len(calls))]

    def _ask(
        self, calls: Sequence[Call], todo: list[int], timeout_seconds: float, results: dict[int, Any]
    ) -> tuple[Exception | None, bool]:
        """Let the calls of `todo` run; gives why not all of them came to an end, and whether they ran together."""
        together = False
        late = TimeoutError(f"it took longer than reward_model.timeout_seconds={timeout_seconds:g}")
        try:
            problem = self._connect(max(LOAD_SECONDS, timeout_seconds))
            if problem is not None:
                return problem, True
            assert self._connection is not None
            self._connection.send(([calls[number] for number in todo], timeout_seconds))
            for _ in todo:
                limit = timeout_seconds + GRACE_SECONDS * together
                if not self._connection.poll(limit):
                    return late, together
                message = self._connection.recv()
                if message == AWAITING:
                    together = True
                    if not self._connection.poll(timeout_seconds + GRACE_SECONDS):
                        return late, together
                    message = self._connection.recv()
                number, result = _result(message)
                is_cancelled = together and isinstance(result, TimeoutError) and not str(result)
                results[todo[number]] = late if is_cancelled else result
        except (EOFError, OSError):
            return RuntimeError(f"the reward function's process {self._ending()}"), together
        except BaseException:  # an interrupt: answers to these calls must not be taken for those of the next
            self._stop()
            raise
        return None, together

    def _connect(self, load_seconds: float) -> Exception | None:
        """Start the process and load the function, unless that was done; gives what went wrong."""
        if self._connection is not None and self._owner == os.getpid():
            return None
        # The signal of a parent's death comes at the death of the thread that started the process.
        is_main = threading.current_thread() is threading.main_thread()
        self._process, self._connection = start_script(Path(function_server.__file__), str(int(is_main)))
        self._owner = os.getpid()
        self._connection.send(self._source)
        if not self._connection.poll(load_seconds):
            return TimeoutError(f"the reward function could not be loaded within {load_seconds:g} s")
        return _result(self._connection.recv())[1]

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def close(self) -> None:
        """End the process. The next call starts a new one."""
        with self._lock:
            self._stop()


def _result(message: Outcome) -> tuple[int, Any]:
    number, pickled, text = message
    if pickled is not None:
        try:
            return number, pickle.loads(pickled)
        except Exception:  # of a class that only the function's file knows
            logger.debug("a result can't be read here", exc_info=True)
    return number, RuntimeError(f"the reward function gave what this process can't read: {text}")


_PROCESSES: dict[bytes, FunctionProcess] = {}


def function_process(source: bytes) -> FunctionProcess:
    """The process of a function, one for all who call it from this process."""
    if source not in _PROCESSES:
        _PROCESSES[source] = FunctionProcess(source)
        atexit.register(_PROCESSES[source].close)
    return _PROCESSES[source]
