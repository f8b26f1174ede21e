"""`paceline report RUN [RUN ...]`: a page of one run, or of several to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.errors import ConfigError, StorageError

EXAMPLES = (
    "runs/paceline/ppo                                    writes runs/paceline/ppo/report.html",
    "runs/paceline/ppo --output page.html",
    "runs/paceline/ppo --step 437                         a long run: this step too, with its timeline and samples",
    "runs/a runs/b runs/c --output compare.html           compares them; without --output: ./report.html",
)


def main(argv: Sequence[str]) -> int:
    """Write the page and say where. Gives the exit code."""
    parser = make_parser("report", "Make one self-contained HTML page of a run, or of several to compare.", EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; it may still be going on")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="(one run: RUN/report.html; several: ./report.html)"
    )
    parser.add_argument(
        "--step", type=int, action="append", default=[], help="a step to show; may come several times (evenly spread)"
    )
    arguments = parser.parse_args(argv)

    from paceline.report.page import PAGE_FILE, write_page

    runs = [run.expanduser() for run in arguments.runs]
    output = arguments.output or (runs[0] / PAGE_FILE if len(runs) == 1 else Path(PAGE_FILE))
    with errors_as_exit_codes():
        if output.is_dir():
            raise ConfigError(f"--output {output} is a folder. Give a file in it, such as {output / PAGE_FILE}.")
        try:
            size = write_page(runs, output, arguments.step)
        except OSError as error:
            raise StorageError(f"The page can't be made: {error}.") from error
    print(f"{output} ({size / 1e6:.2f} MB): open it in a browser")
    return 0
