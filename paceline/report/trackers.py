"""Where the metrics of a step go: metrics.jsonl always; the console, TensorBoard and others by `trainer.logger`.

Takes one dict of metrics per step and writes it at once, so that a killed run loses at most the line it was writing.
A line of metrics.jsonl is `{"step": 3, "actor/pg_loss": -0.02, ...}`; see `json_lines` for NaN and infinity.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.config.checks import check_loggers
from paceline.errors import ConfigError
from paceline.files import append_whole, keep_old
from paceline.log_file import SAMPLES_LOGGER
from paceline.report.json_lines import Row, cut_back, json_line, plain, row_of_step
from paceline.report.package_trackers import PACKAGE_TRACKERS
from paceline.report.samples import as_text, evenly_chosen
from paceline.report.validation_metrics import HEADLINE, headlines
from paceline.run_folder import METRICS_FILE, TENSORBOARD_FOLDER

logger = logging.getLogger(__name__)

CONSOLE_METRICS = {
    "critic/score/mean": "score {:.3f}",
    "train/loss": "loss {:.4f}",
    "val/loss": "val loss {:.4f}",
    "val/accuracy": "val accuracy {:.3f}",
    "timing_s/step": "{:.2f} s",
    "actor/ppo_kl": "kl {:.5f}",
    "response_length/mean": "length {:.1f}",
    "actor/entropy": "entropy {:.3f}",
    "perf/throughput": "{:.0f} tokens/s",
    "actor/pg_loss": "pg_loss {:.4f}",
}
"""Metrics of the console's line, in its order; those at the end give way to what a validation measured."""
CONSOLE_WIDTH = 80


class Tracker(Protocol):
    """One place that metrics go to. Values are plain Python: numbers, strings, lists."""

    def log(self, metrics: Row, step: int) -> None: ...

    def close(self) -> None: ...


class TextTracker(Tracker, Protocol):
    """One that can also show texts: `rows` are those of `dumps.generation_rows`."""

    def show(self, rows: Sequence[Row], step: int) -> None: ...


class Tracking:
    """All trackers of a run.

    `resume_step` is the step of the checkpoint that the run goes on from: what was logged after it is cut off, for it
    will come again. None is a fresh start: files of an earlier run in the same folder are kept under a numbered name.
    `total_steps` is only shown; `config`, the run's keys and values, is shown where a tracker has a place for it.
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
        config: Mapping[str, object] | None = None,
    ) -> None:
        if problems := list(check_loggers(loggers)):
            raise ConfigError(problems)
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = JsonlTracker(folder / METRICS_FILE, resume_step)
        self._trackers: list[Tracker] = [self._jsonl]
        self._text_trackers: list[TextTracker] = []
        if "console" in loggers:
            self._trackers.append(ConsoleTracker(total_steps))
        if "tensorboard" in loggers:
            self._text_trackers.append(TensorBoardTracker(folder / TENSORBOARD_FOLDER, resume_step))
        resumed = resume_step is not None
        self._text_trackers += [
            make(folder, project_name, experiment_name, config or {}, resumed)
            for name, make in PACKAGE_TRACKERS.items()
            if name in loggers
        ]
        self._trackers += self._text_trackers
        logger.info("metrics of %s/%s go to %s", project_name, experiment_name, folder / METRICS_FILE)

    def add(self, tracker: Tracker) -> None:
        """One more, from the next line on."""
        self._trackers.append(tracker)

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Write the metrics of `step`: once per step, in rising order."""
        if self._jsonl.last_step is not None and step <= self._jsonl.last_step:
            raise ValueError(
                f"Step {step} was to be logged after step {self._jsonl.last_step}; "
                "collect all metrics of a step and log it once."
            )
        plain_metrics = plain(metrics)
        for tracker in self._trackers:
            tracker.log(plain_metrics, step)

    def show_generations(self, rows: Sequence[Row], step: int, count: int) -> None:
        """Show `count` of a validation's responses in the log and in every tracker that can show text."""
        chosen = [rows[row] for row in evenly_chosen(len(rows), count)]
        for row in chosen:
            logging.getLogger(SAMPLES_LOGGER).info("step %d validation\n%s", step, as_text(row))
        for tracker in self._text_trackers if chosen else ():
            tracker.show(chosen, step)

    def close(self) -> None:
        """Flush and close everything; what fails is logged, so that it neither hides an error nor keeps others open."""
        for tracker in self._trackers:
            try:
                tracker.close()
            except OSError as error:
                logger.warning("%s could not be closed: %s", type(tracker).__name__, error)
            except Exception:
                logger.warning("%s could not be closed", type(tracker).__name__, exc_info=True)


class JsonlTracker:
    """One line per step in metrics.jsonl."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.last_step: int | None = None
        if resume_step is None:
            keep_old(path)
        elif path.exists():
            self.last_step = next((row["step"] for row in reversed(cut_back(path, resume_step))), None)
        # Unbuffered, and a line is one write: what a killed process had logged is in the file.
        self._file = path.open("ab", buffering=0)

    def log(self, metrics: Row, step: int) -> None:
        append_whole(self._file, json_line({"step": step, **metrics}))
        self.last_step = step

    def close(self) -> None:
        self._file.close()


class ConsoleTracker:
    """One readable line per step, through `logging`."""

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = total_steps

    def log(self, metrics: Row, step: int) -> None:
        logger.info("%s", console_line(metrics, step, self._total_steps))

    def close(self) -> None:
        pass


class TensorBoardTracker:
    """Scalars for TensorBoard; what is not a number is left to metrics.jsonl."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads TensorBoard: only for those who asked for it

        if resume_step is None:
            keep_old(folder)
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def log(self, metrics: Row, step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, rows: Sequence[Row], step: int) -> None:
        for number, row in enumerate(rows, 1):
            # TensorBoard reads Markdown, where an indented block stands as it is.
            text = "\n".join(f"    {line}" for line in as_text(row).splitlines())
            self._writer.add_text(f"val/generations/{number}", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def console_line(metrics: Row, step: int, total_steps: int | None = None) -> str:
    """The console's line of a step, of at most 80 columns; a metric that the step does not have is left out.

    Of validation it shows the accuracy, and the reward only of sources that have no accuracy.

    >>> console_line({"critic/score/mean": 0.5, "val-core/openai/gsm8k/acc/mean@1": 0.75}, step=3, total_steps=60)
    'step 3/60 | score 0.500 | val gsm8k acc 0.750'
    """
    begin = f"step {step}" if total_steps is None else f"step {step}/{total_steps}"
    validated = [
        _validation_part(name, value) for name in headlines(metrics) if isinstance(value := metrics[name], int | float)
    ]
    measured = [
        template.format(metrics[name])
        for name, template in CONSOLE_METRICS.items()
        if isinstance(metrics.get(name), int | float)
    ]
    # The score first, then what validation says, then the rest as far as there is room.
    kept: set[str] = set()
    room = CONSOLE_WIDTH - len(begin)
    for part in [*measured[:1], *validated, *measured[1:]]:
        room -= len(part) + len(" | ")
        if room < 0:
            break
        kept.add(part)
    return " | ".join([begin, *(part for part in [*measured, *validated] if part in kept)])


def _validation_part(name: str, value: float) -> str:
    """A metric such as val-core/openai/gsm8k/acc/mean@4, short."""
    *source, metric, mean = name.removeprefix(HEADLINE).split("/")
    samples = mean.removeprefix("mean")
    return f"val {source[-1] if source else name} {metric}{'' if samples == '@1' else samples} {value:.3f}"


def read_metrics(path: str | os.PathLike[str]) -> list[Row]:
    """The lines of a metrics.jsonl, in their order; a line that a killed run left half written is passed over."""
    with open(path, "rb") as file:
        return [metrics for line in file if (metrics := row_of_step(line)) is not None]
