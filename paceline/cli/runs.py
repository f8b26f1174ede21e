"""`paceline runs DIR`: the runs in a folder, the newest first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.errors import DataError
from paceline.report.json_lines import Row, finite
from paceline.run_folder import RUNS_FOLDER

EXAMPLES = ("runs", "runs/paceline --plain")
DEEPEST = 4
"""Folders of runs are looked for so many levels down."""
TRAINING_SCORE = "critic/score/mean"


def main(argv: Sequence[str]) -> int:
    """Print a line for each run."""
    parser = make_parser("runs", "List the runs in a folder: state, steps, best score, age.", EXAMPLES)
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS_FOLDER, metavar="DIR", help="(runs)")
    parser.add_argument("--plain", action="store_true", help="columns divided by tabs, for other programs")
    arguments = parser.parse_args(argv)
    with errors_as_exit_codes():
        folder = arguments.folder.expanduser()
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder.")
        rows = sorted(
            (describe(run, folder) for run in find_runs(folder)), key=lambda row: row["updated"], reverse=True
        )
        if not rows:
            raise DataError(f"there are no runs in {folder}, nor in folders {DEEPEST} levels down.")
        table = [["run", "state", "step", "best score", "age"], *(cells(row) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        for line in table:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("\t".join(line) if arguments.plain else "  ".join(padded).rstrip())
    return 0


def find_runs(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Folders with the files of a run; those in a run are its own."""
    from paceline.run_folder import METRICS_FILE, STATUS_FILE

    if (folder / METRICS_FILE).is_file() or (folder / STATUS_FILE).is_file():
        yield folder
    elif depth < DEEPEST:
        try:
            below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        except PermissionError:
            return
        for path in below:
            yield from find_runs(path, depth + 1)


def describe(run: Path, folder: Path) -> Row:
    """State, steps, best score and last sign of life of a run."""
    from paceline.report.status import read_status
    from paceline.report.trackers import read_metrics
    from paceline.report.validation_metrics import HEADLINE
    from paceline.run_folder import METRICS_FILE

    metrics, status = run / METRICS_FILE, read_status(run) or {}
    lines = read_metrics(metrics) if metrics.is_file() else []
    names = sorted({name for line in lines for name in line if name.startswith(HEADLINE)}) or [TRAINING_SCORE]
    scores = {name: [value for line in lines if (value := finite(line.get(name))) is not None] for name in names}
    written = [path.stat().st_mtime for path in (metrics,) if path.is_file()]
    return {
        "run": str(run.relative_to(folder)) if run != folder else run.resolve().name,
        "state": {"silent": "killed"}.get(status.get("state", "unknown"), status.get("state", "unknown")),
        "step": lines[-1]["step"] if lines else 0,
        "total": status.get("total_steps"),
        "best": {name.removeprefix(HEADLINE): max(values) for name, values in scores.items() if values},
        "updated": max([status.get("updated", 0.0), *written]),
    }


def cells(row: Row) -> list[str]:
    """A line of the table."""
    from paceline.report.live import duration

    best = ", ".join(
        f"{value:.3f} ({'training' if name == TRAINING_SCORE else name})" for name, value in row["best"].items()
    )
    steps = f"{row['step']}" + (f"/{row['total']}" if row["total"] else "")
    return [row["run"], row["state"], steps, best or "-", duration(max(0.0, time.time() - row["updated"]))]
