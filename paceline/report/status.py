"""How a run stands at this moment, in status.json: for the terminal that started it, and for its report.

    {"state": "running", "step": 7, "total_steps": 50, "first_step": 0, "started": 1767.0, "updated": 1790.5,
     "running": {"actor_rollout_ref_pool": "generate_sequences", "critic_pool": "update_critic"},
     "processes": {"driver": 4711, "critic_pool critic rank 0": 4715}, "host": "node-1"}

`first_step` is the last step of an earlier start, from whose checkpoint this one goes on. While the run validates there
is `"validation": [640, 1319]`: prompts answered, and all. Where the rollout is ahead of the training, `"queue"` has the
prompts that are, and `"waits"` says which side waits for the other: "training" or "rollout". `"deaths"` counts the
starts before this one that failed or were killed. The file is written every second. A run whose file says `running` and
is old was killed, or its machine is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from paceline.files import write_atomically
from paceline.report.json_lines import Row, plain
from paceline.run_folder import STATUS_FILE

WRITE_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""A running run is not silent for so long."""

State = Literal["running", "finished", "stopped", "failed"]


class StatusWriter:
    """Keeps status.json up to date from a thread, until `close`.

    `running` gives what runs now, by pool; `more` what else there is to say of it.
    """

    def __init__(
        self,
        path: Path,
        running: Callable[[], dict[str, str]],
        total_steps: int,
        first_step: int = 0,
        more: Callable[[dict[str, str]], Row] = lambda running: {},
        deaths: int = 0,
    ) -> None:
        self._path = path
        self._running = running
        self._more = more
        self.validation = (0, 0)
        self._host = socket.gethostname()
        self.processes: dict[str, int] = {"driver": os.getpid()}
        """Process ids by name, on whatever node."""
        self._status: Row = {
            "state": "running",
            "step": first_step,
            "total_steps": total_steps,
            "first_step": first_step,
            "deaths": deaths,
        }
        self._status["started"] = time.time()
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        self._thread.start()

    def set_step(self, step: int) -> None:
        self._status["step"] = step

    def set_validation(self, done: int, total: int | None = None) -> None:
        """How many prompts of a validation have been answered, and of how many if that is new; 0 of 0 at its end."""
        self.validation = (done, self.validation[1] if total is None else total)

    def close(self, state: State, error: str | None = None) -> None:
        """Write the last status; a second time does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._status |= {"state": state} | ({"error": error} if error else {})
        self._write()

    def _keep_writing(self) -> None:
        while not self._closed.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        # A full or unreachable disk is for the run's own records to complain of.
        with contextlib.suppress(OSError):
            running = {} if self._closed.is_set() else self._running()
            now: Row = {
                "updated": time.time(),
                "running": running,
                "processes": dict(self.processes),
                "host": self._host,
            }
            now |= self._more(running) if running else {}
            if self.validation[1]:
                now["validation"] = self.validation
            _replace(self._path, {**self._status, **now})


def end_status(run_dir: Path, state: State, error: str | None = None, *, since: float = 0.0) -> None:
    """Say how a run ended whose own process can't say so any more; one that did, or began before `since`, stays."""
    path = run_dir / STATUS_FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        status = json.loads(path.read_text())
        if status["state"] == "running" and status["started"] >= since:
            status |= {"state": state, "running": {}} | ({"error": error} if error else {})
            _replace(path, status)


def deaths_before(run_dir: Path, *, resumes: bool) -> int:
    """How often a run died before the start that asks; one that ended in order and is not resumed counts anew."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text())
        died = status["state"] in ("running", "failed")
        return int(status.get("deaths", 0)) + died if died or resumes else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _replace(path: Path, status: Row) -> None:
    write_atomically(path, json.dumps(plain(status)).encode(), durable=False)  # every second: it must cost nothing


def read_status(run_dir: Path) -> Row | None:
    """The status of a run, None if it has none; `state` is "silent" for a run that should write it and does not."""
    try:
        status = json.loads((run_dir / STATUS_FILE).read_text())
        silent = status["state"] == "running" and time.time() - status["updated"] > SILENT_SECONDS
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return status | ({"state": "silent"} if silent else {})
