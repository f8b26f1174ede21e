"""What is new in the folder of a run since one last looked: small events for a page that is already there.

Files are read from where they were read before, so that what a look costs does not grow with the run. A file that
became shorter, or another one, is of a run that was resumed or started anew: then the page is made anew, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.report.json_lines import Row, finite, is_number, read_line
from paceline.report.page.gantt import Calls, span_in
from paceline.report.page.processes import ProcessWatch
from paceline.report.page.read import SPEED, Limits, read_checkpoints, sample_rows
from paceline.report.samples import sample_files
from paceline.report.status import read_status
from paceline.report.timeline import TAIL as TIMELINE_END
from paceline.run_folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    LOGS_FOLDER,
    METRICS_FILE,
    SAMPLES_FOLDER,
    TIMELINE_FILE,
)

LOG_FILE = "driver.log"
LOG_BYTES = 16_000
"""Of the log's end that a page begins with."""
LOG_LINES = 100
"""Of one look."""
TIMELINE_BYTES = 2_000_000
"""Of the timeline's end that a page begins with: the steps before are in its first data."""


class Tail:
    """New whole lines of a file that grows. `restarted` is set when it is no longer the file that was read.

    `ending` is what its writer puts at the end each time, and takes away again.
    """

    def __init__(self, path: Path, start: int = 0, ending: bytes = b"") -> None:
        self._path = path
        self._place = start
        self._ending = ending
        self._inode: int | None = None
        self.restarted = False

    @classmethod
    def of_end(cls, path: Path, most: int, ending: bytes = b"") -> Tail:
        """From so many bytes before the end."""
        try:
            return cls(path, max(0, path.stat().st_size - most), ending)
        except OSError:
            return cls(path, 0, ending)

    def lines(self) -> list[bytes]:
        try:
            found = self._path.stat()
        except OSError:
            self.restarted = self.restarted or self._inode is not None
            return []
        if self._inode not in (None, found.st_ino) or found.st_size < self._place:
            self.restarted = True
        self._inode = found.st_ino
        if self.restarted or found.st_size == self._place:
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            content = file.read(found.st_size - self._place)
        if self._ending and content.endswith(self._ending):
            whole = content.removesuffix(self._ending)
        else:
            whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.splitlines()


class Follower:
    """Of one run. It begins where its files end now: what is in them by then is the page's first data."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self._limits = limits
        self._metrics = Tail.of_end(folder / METRICS_FILE, 0)
        self._timeline = Tail.of_end(folder / TIMELINE_FILE, TIMELINE_BYTES, TIMELINE_END)
        self._alarms = Tail.of_end(folder / ALARMS_FILE, 0)
        self._log = Tail.of_end(folder / LOGS_FOLDER / LOG_FILE, LOG_BYTES)
        self._metrics.lines()
        self._calls = Calls()
        self._collect()
        self._last_sample = max(sample_files(folder / SAMPLES_FOLDER), default=-1)
        self._seen: dict[str, object] = {}
        self._processes = ProcessWatch()

    def changes(self) -> Iterator[Row]:
        """What came since the last call."""
        lines = [row for line in self._metrics.lines() if (row := read_line(line)) is not None and "step" in row]
        if self._metrics.restarted:
            yield {"kind": "reload"}
            return
        self._collect()
        for row in lines:
            yield {"kind": "line", "line": numbers(row)}
            step = row["step"]
            if step in self._calls.by_step:
                gantt = self._calls.data([step])
                yield {"kind": "gantt", "pools": gantt["pools"], "step": gantt["steps"][0]}
            self._calls.forget_before(step - 1)
        yield from self._new_samples(lines)
        status = read_status(self.folder)
        yield from self._if_new("status", status)
        yield from self._if_new("processes", self._processes.look(status or {}))
        if lines or "checkpoints" not in self._seen or self._has_new_checkpoint():
            yield from self._if_new("checkpoints", read_checkpoints(self.folder, self._limits))
        for kind, found in (("alarms", self._alarms.lines()), ("log", self._log.lines()[-LOG_LINES:])):
            if found:
                yield {"kind": kind, "lines": [line.decode(errors="replace") for line in found]}

    def _collect(self) -> None:
        for line in self._timeline.lines():
            event = span_in(line)
            if event is not None and "step" in event.get("args", {}):
                self._calls.add(event)
        if self._timeline.restarted:  # its tail is rewritten at each flush; another file is of another session
            self._timeline = Tail(self.folder / TIMELINE_FILE, ending=TIMELINE_END)

    def _new_samples(self, lines: list[Row]) -> Iterator[Row]:
        """Samples are written just before their step's line."""
        for row in lines:
            path = self.folder / SAMPLES_FOLDER / f"{row['step']}.jsonl"
            if path.is_file() and row["step"] > self._last_sample:
                self._last_sample = row["step"]
                yield {"kind": "samples", "step": row["step"], "rows": sample_rows(path, self._limits)}

    def _has_new_checkpoint(self) -> bool:
        try:
            changed: object = os.stat(self.folder / CHECKPOINTS_FOLDER).st_mtime_ns
        except OSError:
            changed = None
        is_new = self._seen.get("checkpoints changed") != changed
        self._seen["checkpoints changed"] = changed
        return is_new

    def _if_new(self, kind: str, value: object) -> Iterator[Row]:
        if kind not in self._seen or self._seen[kind] != value:
            self._seen[kind] = value
            yield {"kind": kind, "value": value}


def numbers(row: Row) -> Row:
    """The metrics of a line that are numbers; what is not finite is None."""
    found = {name: finite(value) for name, value in row.items() if is_number(value) and not isinstance(value, bool)}
    tokens, seconds = found.get("perf/total_num_tokens"), found.get("timing_s/step")
    return found | ({SPEED: tokens / seconds} if tokens is not None and seconds else {})
