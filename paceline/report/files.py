"""Files of an earlier run: put aside, never overwritten."""

from __future__ import annotations

import itertools
import logging
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
