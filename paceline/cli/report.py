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
    "runs/paceline/ppo --serve                            a live page in the browser, at the address that it prints",
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
    parser.add_argument(
        "--serve", action="store_true", help="a live page on this machine instead, until Ctrl-C; it follows the runs"
    )
    parser.add_argument("--port", type=int, default=0, help="of --serve (any free one)")
    arguments = parser.parse_args(argv)

    from paceline.report.page import PAGE_FILE, write_page

    runs = [run.expanduser() for run in arguments.runs]
    if arguments.serve:
        return serve(runs, arguments.port)
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


def serve(runs: Sequence[Path], port: int) -> int:
    """Serve the live page until Ctrl-C."""
    from paceline.report.page.build import page_data
    from paceline.report.page.page_server import PageServer

    with errors_as_exit_codes():
        page_data(runs)  # what is no run is said here, and not in the browser
        try:
            server = PageServer(runs, port)
        except OSError as error:
            raise ConfigError(f"--port {port} can't be served on: {error}. Leave it out, or choose another.") from error
        print(f"{server.address}\nOpen it in a browser on this machine; Ctrl-C ends it, and no run.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.is_closing.set()
            server.server_close()
    return 0
