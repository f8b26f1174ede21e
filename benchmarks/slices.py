"""Several processes that work at the same time in slices: one goes on while the others are stopped.

A machine's speed can change by a third from minute to minute, where it is shared with others; between slices of two
seconds it changes little. Each process is timed by the seconds in which it was not stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

SLICE_SECONDS = 2.0
"""Ray takes a process for dead that is silent for much longer."""
POLL_SECONDS = 0.5
READY_SECONDS = 600
"""How long a process may take to get ready: to start, read its model and take the first step."""
END_SECONDS = 60
END_POLL_SECONDS = 0.05


class SlicedProcess:
    """A command with all the processes that it starts, which are stopped and let go on together."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = psutil.Popen(command, env=dict(environment), stdout=output, stderr=output)
        self._tree: list[psutil.Process] = []
        self._pauses: list[tuple[float, float]] = []
        self._stopped_at: float | None = None

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._pauses.append((self._stopped_at, time.time()))
            self._stopped_at = None
        for process in self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def stop(self) -> None:
        for process in self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        self._stopped_at = time.time()

    def look(self) -> None:
        """See which processes there are; none is an error. Takes time itself, so not while another goes on."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args} ended too early:\n{self._end_of_log()}")
        self._tree = [*self._process.children(recursive=True), self._process]

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Leave it alone until then, and stop it."""
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            time.sleep(POLL_SECONDS)
            self.look()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._process.args} is not ready after {READY_SECONDS} seconds:\n{self._end_of_log()}"
                )
        self.look()
        self.stop()

    def own_seconds(self, start: float, end: float) -> float:
        """How long it went on between two moments of the clock."""
        pauses = [*self._pauses, *([(self._stopped_at, end)] if self._stopped_at else [])]
        return end - start - sum(max(0.0, min(end, until) - max(start, since)) for since, until in pauses)

    def largest_resident(self) -> int:
        """The most bytes of main memory that one of its processes has held, so far: of that with the models."""
        peaks = [0]
        for process in self._tree:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                peaks.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))))
        return max(peaks)

    def end(self) -> None:
        """Ask it to end, and make it."""
        self.go_on()
        if self._process.poll() is None:
            self._process.terminate()
        everyone = {*self._tree, self._process}
        deadline = time.monotonic() + END_SECONDS
        while any(map(_goes_on, everyone)) and time.monotonic() < deadline:
            time.sleep(END_POLL_SECONDS)
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _end_of_log(self) -> str:
        return self._log.read_text()[-4000:]


def _goes_on(process: psutil.Process) -> bool:
    """False also for one that has ended and whose parent has not taken note of it yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def take_slices(processes: Sequence[SlicedProcess], until: Callable[[], bool]) -> None:
    """Let each of these, which are stopped, go on in its turn, and leave them stopped."""
    while not until():
        for process in processes:
            process.look()
            process.go_on()
            time.sleep(SLICE_SECONDS)
            process.stop()
