"""A run in the terminal that started it: a view while it runs, and two lines at its end.

The view has step, what each pool is at, scores, speed and time left. It follows status.json and metrics.jsonl in the
run's folder, since the run itself is driven by another process, which may be started again. It stands below the lines
that the run prints, and is gone when the run ends.
"""

from __future__ import annotations

import logging
import os
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.report.json_lines import Row, finite, read_line
from paceline.report.status import read_status
from paceline.report.trackers import read_metrics
from paceline.report.validation_metrics import HEADLINE, headlines
from paceline.run_folder import METRICS_FILE

REFRESHES_PER_SECOND = 2
BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 40
STEPS_OF_SPEED = 10
"""Newest steps from which the time that is left is guessed."""
SCORE = "critic/score/mean"


@contextmanager
def live_view(run_dir: Path, wanted: bool | None) -> Iterator[None]:
    """Show the run in the block; None: if this is a terminal that can move its cursor."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not (is_terminal if wanted is None else wanted):
        yield
        return
    view = RunView(run_dir)
    console = Console(stderr=True, force_terminal=True)
    live = Live(get_renderable=view.render, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True)
    with live, _logging_above():
        yield


@contextmanager
def _logging_above() -> Iterator[None]:
    """Log lines go through the stream that the view has put in place of stderr, as printed ones do."""
    handlers = [
        (handler, handler.stream)
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__)
    ]
    for handler, _ in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in handlers:
            handler.setStream(stream)


class RunView:
    """What is known of a run, read again at every refresh."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._since = time.time()
        self._metrics = MetricsTail(run_dir / METRICS_FILE)

    def render(self) -> RenderableType:
        """The view as it stands; it must not fail, whatever the files hold."""
        table = Table.grid(padding=(0, 2))
        for name, value in self.rows():
            table.add_row(Text(name, style="bold"), Text(value))
        return Panel(table, title="paceline", title_align="left", expand=False)

    def rows(self) -> list[tuple[str, str]]:
        """Pairs of name and text."""
        status = read_status(self._run_dir)
        if status is None or status["updated"] < self._since:  # of an earlier run in this folder
            return [("run", f"starting, {time.time() - self._since:.0f} s: processes load their models")]
        lines = self._metrics.read()
        total, first_step = status["total_steps"], status.get("first_step", 0)
        finished = lines[-1]["step"] if lines else first_step
        rows = [("step", f"{status['step']}/{total}  {progress_bar(finished / max(total, 1))}")]
        if "validation" in status:
            done, prompts = status["validation"]
            rows.append(("validation", f"{done}/{prompts} prompts  {progress_bar(done / max(prompts, 1))}"))
        rows += [(pool, method) for pool, method in sorted(status["running"].items())]
        rows += queue_rows(status)
        score = values_of(lines, SCORE)
        if score:
            rows.append(("score", f"{score[-1]:.3f}  {sparkline(score)}"))
        for name in headline_metrics(lines):
            measured = values_of(lines, name)
            rows.append((name.removeprefix(HEADLINE), f"{measured[-1]:.3f}  {sparkline(measured)}"))
        if ages := values_of(lines, "training/staleness/mean"):
            oldest = values_of(lines, "training/staleness/max")[-1]
            rows.append(("staleness", f"{ages[-1]:.2f} updates, {oldest:.0f} at most"))
        # Those of an earlier start may be of another machine, with other work beside them.
        newest = [line for line in lines if line["step"] > first_step][-STEPS_OF_SPEED:]
        seconds, tokens = values_of(newest, "timing_s/step"), values_of(newest, "perf/total_num_tokens")
        if seconds and tokens:
            rows.append(
                ("speed", f"{sum(tokens) / sum(seconds):,.0f} tokens/s, {statistics.mean(seconds):.1f} s a step")
            )
            left = (total - finished) * statistics.mean(seconds)
            rows.append(("left", f"about {duration(left)}"))
        return rows


def queue_rows(status: Row) -> list[tuple[str, str]]:
    """Of a run whose rollout is ahead of the training: what is ahead, and which side waits.

    >>> queue_rows({"queue": {"sampling": 12, "ended": 4}, "waits": "training"})
    [('queue', '12 prompts sampling, 4 prompts ended'), ('waiting', 'the training for responses')]
    """
    queue = ", ".join(f"{count} prompts {what}" for what, count in status.get("queue", {}).items())
    waits = {"training": "the training for responses", "rollout": "the rollout for the training"}.get(
        status.get("waits", ""), "" if "queue" not in status else "neither side"
    )
    return [(name, text) for name, text in (("queue", queue), ("waiting", waits)) if text]


class MetricsTail:
    """The last lines of a metrics.jsonl that grows, is cut back by a resume, or is replaced."""

    def __init__(self, path: Path, keep: int = 500) -> None:
        self._path = path
        self._lines: deque[Row] = deque(maxlen=keep)
        self._offset = 0
        self._inode = 0

    def read(self) -> list[Row]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                    self._lines.clear()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):  # being written
                        break
                    self._offset += len(line)
                    if (row := read_line(line)) is not None:
                        self._lines.append(row)
        except OSError:
            pass
        return list(self._lines)


def closing_text(run_dir: Path) -> str:
    """Two lines, by the run's own metrics; nothing of a run that has none here.

    best validation: openai/gsm8k/acc/mean@1 0.956 at step 40 of 50
    next: paceline report runs/paceline/ppo
    """
    path = run_dir / METRICS_FILE
    lines = read_metrics(path) if path.is_file() else []
    if not lines:
        return ""
    last = lines[-1]["step"]
    best = []
    for name in headline_metrics(lines) or [SCORE]:
        measured = [(value, line["step"]) for line in lines if (value := finite(line.get(name))) is not None]
        if measured:
            value, step = max(measured, key=lambda point: point[0])  # of equal ones the first
            kind = "training score" if name == SCORE else f"validation: {name.removeprefix(HEADLINE)}"
            best.append(f"best {kind} {value:.3f} at step {step} of {last}")
    return "".join(f"{line}\n" for line in [*best, f"next: paceline report {shlex.quote(_short(run_dir))}"])


def _short(folder: Path) -> str:
    """Relative to where the command was given, if it is below that."""
    here = Path.cwd()
    return os.path.relpath(folder, here) if folder.is_absolute() and folder.is_relative_to(here) else str(folder)


def values_of(lines: Sequence[Row], name: str) -> list[float]:
    """The finite values of a metric."""
    return [value for line in lines if (value := finite(line.get(name))) is not None]


def headline_metrics(lines: Sequence[Row], most: int = 3) -> list[str]:
    """The headlines of validation that were measured."""
    names = headlines(name for line in lines for name in line)
    return [name for name in names if values_of(lines, name)][:most]


def sparkline(values: Sequence[float]) -> str:
    """The newest values as bars.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    shown = values[-NUM_BARS:]
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def progress_bar(share: float, width: int = 30) -> str:
    """A bar with its percentage.

    >>> progress_bar(0.5, width=4)
    '━━╌╌ 50 %'
    """
    full = round(min(share, 1.0) * width)
    return f"{'━' * full}{'╌' * (width - full)} {share:.0%}".replace("%", " %")


def duration(seconds: float) -> str:
    """Seconds in the two largest units.

    >>> duration(42.4), duration(125), duration(7300)
    ('42 s', '2 min 5 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
