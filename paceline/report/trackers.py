"""Where the metrics of a step go: metrics.jsonl always, the console and TensorBoard by `trainer.logger`.

Takes one dict of metrics per step and writes it at once, so that a killed run loses at most the line it was writing.
A line of metrics.jsonl is `{"step": 3, "actor/pg_loss": -0.02, ...}`. JSON knows no NaN and no infinity: they stand
there as the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads back.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import ConfigError
from paceline.report.files import keep_old

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

CONSOLE_METRICS = {
    "critic/score/mean": "score {:.3f}",
    "actor/pg_loss": "pg_loss {:.4f}",
    "actor/ppo_kl": "ppo_kl {:.5f}",
    "actor/entropy": "entropy {:.3f}",
    "response_length/mean": "length {:.1f}",
    "timing_s/step": "{:.2f} s",
    "perf/throughput": "{:.0f} tokens/s per device",
}
"""Metrics of the console's line, in its order."""


class Tracker(Protocol):
    """One place that metrics go to. Values are plain Python: numbers, strings, lists."""

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """All trackers of a run.

    `resume_step` is the step of the checkpoint that the run goes on from: what was logged after it is cut off, for it
    will come again. None is a fresh start: files of an earlier run in the same folder are kept under a numbered name.
    `total_steps` is only shown.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        loggers: list[str],
        project_name: str,
        experiment_name: str,
        *,
        resume_step: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        _check_names(loggers)
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = JsonlTracker(folder / METRICS_FILE, resume_step)
        self._trackers: list[Tracker] = [self._jsonl]
        if "console" in loggers:
            self._trackers.append(ConsoleTracker(total_steps))
        if "tensorboard" in loggers:
            self._trackers.append(TensorBoardTracker(folder / TENSORBOARD_FOLDER, resume_step))
        logger.info("metrics of %s/%s go to %s", project_name, experiment_name, folder / METRICS_FILE)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of `step`: once per step, in rising order."""
        if self._jsonl.last_step is not None and step <= self._jsonl.last_step:
            raise ValueError(
                f"Step {step} was to be logged after step {self._jsonl.last_step}; "
                "collect all metrics of a step and log it once."
            )
        plain = {name: _plain(value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(plain, step)

    def close(self) -> None:
        """Flush and close everything."""
        for tracker in self._trackers:
            tracker.close()


class JsonlTracker:
    """One line per step in metrics.jsonl."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.last_step: int | None = None
        if resume_step is None:
            keep_old(path)
        elif path.exists():
            self.last_step = _cut_back(path, resume_step)
        # Unbuffered, and a line is one write: what a killed process had logged is in the file.
        self._file = path.open("ab", buffering=0)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        line = json.dumps({"step": step, **_without_non_finite(metrics)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self.last_step = step

    def close(self) -> None:
        self._file.close()


class ConsoleTracker:
    """One readable line per step, through `logging`."""

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = total_steps

    def log(self, metrics: dict[str, Any], step: int) -> None:
        logger.info("%s", console_line(metrics, step, self._total_steps))

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """Scalars for TensorBoard; what is no number is left to metrics.jsonl."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads TensorBoard: only for those who asked for it

        if resume_step is None:
            keep_old(folder)
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def console_line(metrics: dict[str, Any], step: int, total_steps: int | None = None) -> str:
    """The console's line of a step; a metric that the step does not have is left out.

    Of validation it shows the accuracy, and the reward only of sources that have no accuracy.

    >>> console_line({"critic/score/mean": 0.5, "timing_s/step": 1.234}, step=3, total_steps=60)
    'step 3/60 | score 0.500 | 1.23 s'
    """
    parts = [f"step {step}" if total_steps is None else f"step {step}/{total_steps}"]
    parts += [
        f"val {name.removeprefix('val-core/')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("val-core/")
        and isinstance(value, int | float)
        and ("/reward/" not in name or name.replace("/reward/", "/acc/") not in metrics)
    ]
    parts += [
        template.format(metrics[name])
        for name, template in CONSOLE_METRICS.items()
        if isinstance(metrics.get(name), int | float)
    ]
    return " | ".join(parts)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in their order; a line that a killed run left half written is passed over."""
    with open(path, "rb") as file:
        return [metrics for line in file if (metrics := _parse(line)) is not None]


def _check_names(names: list[str]) -> None:
    known = ["console", "tensorboard"]
    problems = []
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            problems.append(
                f"trainer.logger names {name!r}; known are {', '.join(known)} (metrics.jsonl is always written).{hint}"
            )
    if problems:
        raise ConfigError(problems)


def _plain(value: Any) -> Any:
    """The value as JSON and TensorBoard take it: arrays and tensors as numbers or lists, the unknown as its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return value


def _cut_back(path: Path, resume_step: int) -> int | None:
    """Keep the lines up to `resume_step`; gives the last step kept. A crash on the way leaves the old file."""
    lines = path.read_bytes().splitlines(keepends=True)
    parsed = [(line, _parse(line)) for line in lines]
    kept = [(line, metrics["step"]) for line, metrics in parsed if metrics and metrics["step"] <= resume_step]
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.writelines(line for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        logger.info("cut %d lines after step %d off %s", len(lines) - len(kept), resume_step, path)
    last_step = kept[-1][1] if kept else None
    if last_step != resume_step:
        logger.warning("%s has no line of step %d, the step resumed from; its last is %s", path, resume_step, last_step)
    return last_step


def _parse(line: bytes) -> dict[str, Any] | None:
    """The metrics of one line, or None if it was not written to its end."""
    try:
        metrics = json.loads(line)
    except ValueError:
        return None
    return metrics if line.endswith(b"\n") and isinstance(metrics, dict) and "step" in metrics else None
