"""Files of a run: written whole or not at all, and those of an earlier run put aside, never overwritten."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def keep_old(path: Path) -> None:
    """Rename what an earlier run left at `path` to the first free numbered name: metrics.jsonl to metrics.1.jsonl."""
    if not path.exists():
        return
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    kept = next(candidate for candidate in numbered if not candidate.exists())
    path.rename(kept)
    logger.info("%s is of an earlier run; kept as %s", path, kept.name)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
