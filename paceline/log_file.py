"""The log of a process: in its terminal, and as a file in the folder that an environment variable names."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.redaction import RedactingFormatter, remember_environment

logger = logging.getLogger(__name__)

LOG_FOLDER_VARIABLE = "PACELINE_LOG_FOLDER"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_terminal() -> None:
    """One readable line per record, without secrets, unless the program has set up logging itself."""
    remember_environment()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


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
