"""Python files of ours that run as processes of their own, with a pipe between."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["start_script"]


def start_script(
    file: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """The process, whose first argument is the descriptor of its end of the pipe, and our end.

    It is a plain subprocess, not a multiprocessing child: that would run the main module again, which is pytest, Ray's
    worker or a script without a `__main__` guard.
    """
    ours, theirs = multiprocessing.Pipe()
    environment = {**os.environ, **(variables or {})}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # -P: the folder of the script, whose files have names such as math.py, stays out of the import path.
    process = subprocess.Popen(
        [sys.executable, "-P", str(file.resolve()), str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    theirs.close()
    return process, ours
