"""Calls with a deadline: they run in processes of their own, which are killed when a call does not end.

Nothing less ends every function: one that is stuck in C code, such as a regular expression, hears of no exception. The
processes are kept between batches, and with them what the function's file holds at module level. `killable_side.py` is
what runs there.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.machine import num_cores
from paceline.rewards import killable_side
from paceline.rewards.killable_side import AWAITING, Call, Outcome

__all__ = ["FunctionPool", "FunctionProcess", "function_process", "pickled"]

logger = logging.getLogger(__name__)

LOAD_SECONDS = 300.0
"""For starting Python and importing the function's file, which may read a model; at least the time of a call."""
GRACE_SECONDS = 2.0
"""What is awaitable is cancelled at its deadline; the process is killed if that does not help."""
MAX_LOST_IN_A_ROW = 3
"""Calls in a row that did not end by themselves, after which the rest of a batch is not tried."""
END_SECONDS = 5.0
"""How long a process that ends by itself, and takes its workers along, is waited for."""


class FunctionProcess:
    """One function in one process, started at the first call. Safe to use from several threads and after a fork.

    Args:
        source: names the function, as `killable_side.load` reads it.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._num_workers = self._memory_bytes = 0
        self._variables: Mapping[str, str] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def call_all(self, calls: Sequence[Call], timeout_seconds: float) -> list[object]:
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
                failure, together = self._run(calls, todo, timeout_seconds, results)
                if failure is not None:
                    self._stop()
                    lost = [number for number in todo if number not in results]
                    results |= dict.fromkeys(lost if together else lost[:1], failure)
                    lost_in_a_row = lost_in_a_row + 1 if len(results) == before + 1 else 1
        return [results[number] for number in range(len(calls))]

    def _run(
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
                if not self._connection.poll(self._longest_wait(timeout_seconds, together)):
                    return late, together
                message = self._connection.recv()
                if message == AWAITING:
                    together = True
                    if not self._connection.poll(self._longest_wait(timeout_seconds, together)):
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

    def _longest_wait(self, timeout_seconds: float, together: bool) -> float | None:
        """Seconds until the next answer."""
        return timeout_seconds + GRACE_SECONDS * together

    def _connect(self, load_seconds: float) -> Exception | None:
        """Start the process and load the function, unless that was done; gives what went wrong."""
        if self._connection is not None and self._owner == os.getpid():
            return None
        # The signal of a parent's death comes at the death of the thread that started the process.
        is_main = threading.current_thread() is threading.main_thread()
        self._process, self._connection = _start(self._variables, dies_with_parent=is_main and not self._num_workers)
        self._owner = os.getpid()
        self._connection.send((self._source, self._num_workers, self._memory_bytes))
        if not self._connection.poll(load_seconds):
            return TimeoutError(f"the reward function could not be loaded within {load_seconds:g} s")
        _, problem = _result(self._connection.recv())
        return problem if isinstance(problem, Exception) else None

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            try:
                self._process.wait(timeout=END_SECONDS if self._num_workers else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection = self._process = None

    def close(self) -> None:
        """End the process. The next call starts a new one."""
        with self._lock:
            self._stop()


class FunctionPool(FunctionProcess):
    """One function in as many processes as there are cores, forked from one that has loaded it and watches the clock.

    For functions of ours, which start no threads: calls are spread over the cores, each has a process to itself, and
    a call that is killed costs no other one anything.

    Args:
        memory_bytes: address space that each process may take on top of what it starts with.
        variables: of the environment, on top of this process's own.
    """

    def __init__(self, source: bytes, memory_bytes: int, variables: Mapping[str, str]) -> None:
        super().__init__(source)
        self._num_workers, self._memory_bytes, self._variables = num_cores(), memory_bytes, variables

    def call_all(self, calls: Sequence[Call], timeout_seconds: float) -> list[object]:
        """A result for each call, each within the deadline; an exception stands for a failure."""
        results: dict[int, Any] = {}
        failure: Exception | None = None
        with self._lock:
            for attempt in ("first", "second"):
                todo = [number for number in range(len(calls)) if number not in results]
                failure, _ = self._run(calls, todo, timeout_seconds, results)
                if failure is None:
                    break
                logger.warning("At the %s attempt to grade: %s.", attempt, failure)
                self._stop()
        return [results.get(number, failure) for number in range(len(calls))]

    def _longest_wait(self, timeout_seconds: float, together: bool) -> float | None:
        return None  # the other end answers every call


def _start(variables: Mapping[str, str], dies_with_parent: bool) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of `killable_side`, and our end of the pipe to it.

    It is a plain subprocess, not a multiprocessing child: that would run the main module again, which is pytest, Ray's
    worker or a script without a `__main__` guard.
    """
    ours, theirs = multiprocessing.Pipe()
    search_path = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    # -P: the folder of the script stays out of the import path.
    script = [sys.executable, "-P", str(Path(killable_side.__file__).resolve())]
    process = subprocess.Popen(
        [*script, str(theirs.fileno()), str(int(dies_with_parent))],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables, "PYTHONPATH": search_path},
    )
    theirs.close()
    return process, ours


def _result(message: Outcome) -> tuple[int, object]:
    number, pickled, text = message
    if pickled is not None:
        try:
            return number, pickle.loads(pickled)
        except Exception:  # of a class that only the function's file knows
            logger.debug("a result can't be read here", exc_info=True)
    return number, RuntimeError(f"the reward function gave what this process can't read: {text}")


def pickled(fn: Callable[..., object]) -> bytes:
    """The source of a function, always the same bytes for the same function."""
    import cloudpickle  # scorers run without it, also where little is installed

    if id(fn) not in _PICKLED:
        _PICKLED[id(fn)] = (fn, cloudpickle.dumps(("function", fn)))
    return _PICKLED[id(fn)][1]


_PICKLED: dict[int, tuple[Callable[..., object], bytes]] = {}  # holds the function, so that its id stays its own
_PROCESSES: dict[bytes, FunctionProcess] = {}


def function_process(source: bytes) -> FunctionProcess:
    """The process of a function, one for all who call it from this process."""
    if source not in _PROCESSES:
        _PROCESSES[source] = FunctionProcess(source)
        atexit.register(_PROCESSES[source].close)
    return _PROCESSES[source]
