"""What every worker process did when, as a Chrome trace: open timeline.json in https://ui.perfetto.dev.

Takes the records of finished remote calls, and spans that the driver measured itself; gives one row per worker process,
named by pool, roles and rank, and on the row one span per call, named by its method. Times are microseconds since the
epoch.

The file grows by appending and is complete JSON after each flush, one event per line. A run that starts or resumes in a
folder that has a timeline keeps the old one under a numbered name (timeline.1.json): a trace with hours of nothing
between two sessions can't be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.files import append_whole, keep_old
from paceline.report.json_lines import Row

HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'
TAIL = b"\n]}\n"
DRIVER = "driver"

Span = tuple[float, float]
"""Start and end, in seconds since the epoch."""


class FinishedCall(Protocol):
    """One finished remote call."""

    @property
    def pool(self) -> str: ...
    @property
    def process_roles(self) -> str:
        """All roles of the process, joined by +."""

    @property
    def role(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def tag(self) -> Mapping[str, object]: ...


class TimelineWriter:
    """Collects events and appends them to one trace file. Spans on one row must nest or follow one another."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        keep_old(self._path)
        self._pending: list[Mapping[str, object]] = []
        self._rows: dict[tuple[str | int, ...], int] = {}
        self._is_empty = True
        self._path.write_bytes(HEAD + TAIL)

    def add(self, records: Iterable[FinishedCall]) -> None:
        """Take finished remote calls, in any order."""
        for record in records:
            args = {"role": record.role, "rank": record.rank, "pool": record.pool, **record.tag}
            self._add_span(self._worker_row(record), record.method, record.start, record.end, args)

    def add_span(
        self, row_name: str, name: str, start: float, end: float, args: Mapping[str, object] | None = None
    ) -> None:
        """Take a span of the driver's own, such as a phase of the loop, on the row called `row_name`."""
        row = self._row((DRIVER, row_name), row_name)
        self._add_span(row, name, start, end, {"pool": DRIVER, **(args or {})})

    def flush(self) -> None:
        """Append what came since the last flush, with a new end in place of the old one."""
        if not self._pending:
            return
        lines = ",\n".join(json.dumps(event, separators=(",", ":"), default=str) for event in self._pending)
        separator = b"" if self._is_empty else b",\n"
        with self._path.open("r+b", buffering=0) as file:
            end = file.seek(-len(TAIL), os.SEEK_END)
            file.truncate()
            try:
                append_whole(file, separator + lines.encode() + TAIL)
            except OSError:
                file.seek(end)
                file.write(TAIL)  # has room: it was there before
                raise
        self._pending.clear()
        self._is_empty = False

    def close(self) -> None:
        """Flush; nothing is held open between flushes."""
        self.flush()

    def _worker_row(self, record: FinishedCall) -> int:
        return self._row(
            (record.pool, record.node, record.pid), f"{record.pool} {record.process_roles} rank {record.rank}"
        )

    def _row(self, key: tuple[str | int, ...], name: str) -> int:
        """The number of a row, made at first sight: a process in the trace, with a single thread."""
        if key not in self._rows:
            # Numbers start at 1: viewers take process 0 for the operating system's idle task.
            number = self._rows[key] = len(self._rows) + 1
            for kind in ("process_name", "thread_name"):
                self._pending.append({"ph": "M", "name": kind, "pid": number, "tid": number, "args": {"name": name}})
        return self._rows[key]

    def _add_span(self, row: int, name: str, start: float, end: float, args: Mapping[str, object]) -> None:
        begin = round(start * 1e6)
        # The difference of rounded times, so that a span never reaches into the one that follows it.
        duration = round(end * 1e6) - begin
        self._pending.append(
            {"ph": "X", "name": name, "pid": row, "tid": row, "ts": begin, "dur": duration, "args": args}
        )


def read_events(path: str | os.PathLike[str]) -> list[Row]:
    """The spans of a timeline file, without the events that only name rows."""
    trace = json.loads(Path(path).read_bytes())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def spans(path: str | os.PathLike[str], method: str, step: int | None = None) -> list[Span]:
    """Start and end of each call of `method`, in order of start; of one step, or of all."""
    return sorted(
        _span(event)
        for event in read_events(path)
        if event["name"] == method and (step is None or event["args"].get("step") == step)
    )


def busy_seconds(spans: Sequence[Span], start: float, end: float) -> float:
    """How long between `start` and `end` at least one of the spans ran.

    >>> busy_seconds([(0.0, 2.0), (1.0, 3.0), (8.0, 12.0)], 1.0, 10.0)
    4.0
    """
    return sum(max(0.0, min(span_end, end) - max(span_start, start)) for span_start, span_end in merge_spans(spans))


def _span(event: Row) -> Span:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def merge_spans(intervals: Sequence[Span]) -> list[Span]:
    """The same time covered, by intervals that don't overlap."""
    merged: list[Span] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
