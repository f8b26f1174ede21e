"""What a process of a run logs: all of it in a file of its own, and what a person should see in the terminal.

The process that starts a run follows a file in the run's folder (`terminal_lines`), and shows its lines as they are. So
a line of the terminal has no prefix of Ray's. A process on a node that does not share the folder finds no such file,
and writes to stderr, which Ray brings to the terminal.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeGuard

from paceline.redaction import RedactingFormatter, remember_environment

logger = logging.getLogger(__name__)

LOG_FOLDER_VARIABLE = "PACELINE_LOG_FOLDER"
TERMINAL_VARIABLE = "PACELINE_TERMINAL"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SAMPLES_LOGGER = "paceline.samples"
"""For prompts and responses: they are for the log files, where there is room for them."""
ONLY_ERRORS_SHOWN = ("vllm", "py.warnings")
"""Loggers whose warnings are about themselves: they are in the log files, and only errors in the terminal."""
FOLLOW_SECONDS = 0.1


class TerminalFormatter(RedactingFormatter):
    """The message alone, with its level and its process where that matters."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = f" of {process}" if process else ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname}{self._process}: {text}"


def configure_logging() -> None:
    """For a process with a terminal: readable lines on stderr, unless the program has set up logging itself."""
    remember_environment()
    logging.basicConfig(level=logging.INFO, handlers=[_shown(logging.StreamHandler())])


def is_for_terminal(record: logging.LogRecord) -> bool:
    """Whether a record is shown to a person who watches a run."""
    if record.name == SAMPLES_LOGGER:
        return False
    return record.levelno >= logging.ERROR or not record.name.startswith(ONLY_ERRORS_SHOWN)


def log_process(name: str, process: str | None = None) -> None:
    """From now on, what this process logs goes to `<folder>/<name>.log`, and what a person should see to the terminal.

    `process` names a worker: of those only warnings are shown. The driver has none, and shows also information.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = _shown(_terminal_handler(), process)
        handler.setLevel(logging.WARNING if process else logging.INFO)
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)
    log_to_file(name)


def _shown(handler: logging.Handler, process: str | None = None) -> logging.Handler:
    """A handler made to show what a person who watches a run should see."""
    handler.setFormatter(TerminalFormatter(process))
    handler.addFilter(is_for_terminal)
    return handler


def _terminal_handler() -> logging.Handler:
    """Writes to the file that the terminal follows, if it can be reached from here, else to stderr."""
    path = Path(os.environ.get(LOG_FOLDER_VARIABLE, ""), os.environ.get(TERMINAL_VARIABLE, ""))
    with suppress(OSError):
        if path.is_file():
            return logging.FileHandler(path, encoding="utf-8")
    return logging.StreamHandler()


def log_to_file(name: str) -> None:
    """From now on, what this process logs also goes to `<folder>/<name>.log`, after what earlier ones left there."""
    remember_environment()
    folder = os.environ.get(LOG_FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder) / f"{name}.log"
    root = logging.getLogger()
    if any(isinstance(other, logging.FileHandler) and other.baseFilename == str(path) for other in root.handlers):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:  # such as a folder that this node does not share
        logger.warning("%s can't be written, its lines are in the terminal only: %s", path, error)
        return
    handler.setFormatter(RedactingFormatter(FORMAT))
    root.addHandler(handler)


@contextmanager
def output_to_log_file() -> Iterator[None]:
    """Inside the block, what libraries print past `logging` goes to this process's log file, if it has one.

    Standard output and error are turned as file descriptors, since compiled code writes to those.
    """
    path = next((log.baseFilename for log in logging.getLogger().handlers if is_log_file(log)), None)
    if path is None:
        yield
        return
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with open(path, "ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number in kept:
                os.dup2(file.fileno(), number)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def is_log_file(handler: logging.Handler) -> TypeGuard[logging.FileHandler]:
    """Whether a handler is that of `log_to_file`."""
    return isinstance(handler, logging.FileHandler) and handler.baseFilename.endswith(".log")


def terminal_variables() -> dict[str, str]:
    """For the environment of the run's processes: the name of the file that this process follows."""
    return {TERMINAL_VARIABLE: f".terminal.{socket.gethostname()}.{os.getpid()}"}


@contextmanager
def terminal_lines(folder: Path) -> Iterator[None]:
    """Show what the processes of a run write for the terminal, while the block runs."""
    path = folder / terminal_variables()[TERMINAL_VARIABLE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w+", encoding="utf-8", errors="replace")
    except OSError:  # Ray then brings the lines
        yield
        return
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(file, ended), name="terminal", daemon=True)
    follower.start()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        ended.set()
        follower.join()
        file.close()


def _follow(file: TextIO, ended: threading.Event) -> None:
    """Copy whole lines to stderr, which a live view may have replaced, until `ended` and nothing is left."""
    rest = ""
    while True:
        is_last = ended.wait(FOLLOW_SECONDS)
        rest += file.read()
        whole, newline, rest = rest.rpartition("\n")
        if is_last:
            whole, newline = whole + newline + rest, ""
        if whole or newline:
            with suppress(OSError, ValueError):  # a terminal that is gone must not end the run
                sys.stderr.write(whole + newline)
                sys.stderr.flush()
        if is_last:
            return
