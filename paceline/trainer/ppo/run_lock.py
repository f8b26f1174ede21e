"""One run per folder: a second one is an error that names the first."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ConfigError
from paceline.run_folder import LOCK_FILE

PATIENCE_SECONDS = 10.0
"""How long a run that was killed a moment ago may still hold its folder."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the operating system lets go of it when the process ends, however it does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("a+") as file:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ConfigError(
                    f"trainer.default_local_dir: {folder} is in use by another run ({holder}). Wait for it, "
                    "stop it, or set another folder."
                )
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield
        file.truncate(0)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
