"""The same command again, in the place of this process.

Ray starts in code of its own, which no exception ends: where it waits without an end, what is left is a new program in
this process, with its number, terminal and parent. Only of a process that is one command and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

_VARIABLE = "PACELINE_STARTED_AGAIN"
"""What the program before this one in the same process left to it: how many restarts, and whether it goes on."""


@dataclass
class Attempt:
    """The attempt that is going on, and what may follow on it."""

    restarts_left: int = 0
    goes_on: bool = False
    """Those after it begin at a checkpoint of the run, if there is one."""
    given: int | None = None
    """Restarts that the program before this one left."""

    def restarts(self, max_restarts: int) -> int:
        """How many there may be, of `trainer.max_restarts`."""
        return max_restarts if self.given is None else self.given


@dataclass
class _Command:
    folder: str = field(default_factory=os.getcwd)
    arguments: list[str] = field(default_factory=lambda: [sys.executable, *sys.orig_argv[1:]])
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


class StartAgain(BaseException):
    """Raised to leave what is open behind, and begin the same command again. No error: nobody else is to catch it."""


attempt = Attempt()
"""Of this process."""
_command: _Command | None = None


def is_one_command() -> bool:
    """Whether this process may become the same command again."""
    return _command is not None


@contextmanager
def one_command() -> Iterator[None]:
    """Inside, this process may become the same command again."""
    global _command
    given, _, goes_on = os.environ.pop(_VARIABLE, "").partition(" ")
    attempt.given, attempt.goes_on = int(given) if given else None, bool(goes_on)
    _command = _Command()
    try:
        yield
    except StartAgain:
        _begin(_command, attempt.restarts_left - 1)
    finally:
        _command, attempt.given = None, None


def start_again_or_end(reason: str) -> NoReturn:
    """Say why, and begin again if a restart is left; else end this process at once, with exit code 1."""
    if _command is None or not attempt.restarts_left:
        sys.stderr.write(f"{reason} The same command may be started again.\n")
        sys.stderr.flush()
        os._exit(1)
    left = attempt.restarts_left - 1
    sys.stderr.write(f"{reason} Starting the same command again; {left} more restarts.\n")
    _begin(_command, left)


def _begin(command: _Command, restarts_left: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.chdir(command.folder)
    what = f"{restarts_left} goes on" if attempt.goes_on else str(restarts_left)
    os.execve(command.arguments[0], command.arguments, {**command.environment, _VARIABLE: what})
