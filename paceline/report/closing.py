"""The last words of a run in the terminal: its best score, where its records are, and what to do next."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from paceline.report.live import SCORE, headline_metrics, values_of
from paceline.report.trackers import read_metrics
from paceline.run_folder import METRICS_FILE


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
        measured = [(line[name], line["step"]) for line in lines if values_of([line], name)]
        if measured:
            value, step = max(measured, key=lambda point: point[0])  # of equal ones the first
            kind = "training score" if name == SCORE else f"validation: {name.removeprefix('val-core/')}"
            best.append(f"best {kind} {value:.3f} at step {step} of {last}")
    return "".join(f"{line}\n" for line in [*best, f"next: paceline report {shlex.quote(_short(run_dir))}"])


def _short(folder: Path) -> str:
    """Relative to where the command was given, if it is below that."""
    here = Path.cwd()
    return os.path.relpath(folder, here) if folder.is_absolute() and folder.is_relative_to(here) else str(folder)
