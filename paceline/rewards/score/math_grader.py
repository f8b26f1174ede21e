"""The client of `math_server.py`: one grading process for this process, started at its first use."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.machine import num_cores
from paceline.rewards.script import start_script

__all__ = ["MathGrader", "shared_grader"]

logger = logging.getLogger(__name__)

Question = tuple[str, str] | str
"""Are gold and answer equal? Or: which is the last formula of a text?"""
Verdict = bool | list[str] | None | str
"""Right or wrong, or formulas; None if it took too long or too much memory; a message for a failure of the grader."""

_SERVER_FILE = Path(__file__).with_name("math_server.py")


class MathGrader:
    """Grades pairs of answers in processes of their own. Safe to use from several threads and after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def grade(self, pairs: Sequence[Question], deadline_seconds: float) -> list[Verdict]:
        """A verdict for each question, each within the deadline; equal ones are asked once."""
        unique = list(dict.fromkeys(pairs))
        if not unique:
            return []
        with self._lock:
            verdicts = dict(zip(unique, self._ask(unique, deadline_seconds), strict=True))
        return [verdicts[pair] for pair in pairs]

    def _ask(self, pairs: list[Question], deadline_seconds: float) -> list[Verdict]:
        for attempt in ("first", "second"):
            connection = self._connected()
            try:
                connection.send((deadline_seconds, pairs))
                return connection.recv()
            except (EOFError, OSError):
                code = self._process.poll() if self._process else None
                logger.warning("The MATH grading process ended (exit code %s) at the %s attempt.", code, attempt)
                self._stop()
            except BaseException:  # an interrupt: the answer to this question must not be taken for the next one's
                self._stop()
                raise
        return ["the grading process ended twice"] * len(pairs)

    def _connected(self) -> Connection:
        if self._connection is not None and self._owner == os.getpid():
            return self._connection
        # Else sympy's order of terms, and so its speed, would differ from run to run.
        variables = {"PYTHONHASHSEED": "0", "PACELINE_CORES": str(num_cores())}
        self._process, self._connection = start_script(_SERVER_FILE, variables=variables)
        self._owner = os.getpid()
        return self._connection

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            try:
                self._process.wait(timeout=5)  # it ends by itself and takes its workers along
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._connection = self._process = None

    def close(self) -> None:
        """End the processes. The next `grade` starts new ones."""
        with self._lock:
            self._stop()


_SHARED = MathGrader()
atexit.register(_SHARED.close)


def shared_grader() -> MathGrader:
    """The grader of this process."""
    return _SHARED
