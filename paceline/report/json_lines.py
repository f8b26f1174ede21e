"""Values of any kind as lines of JSON.

JSON knows no NaN and no infinity: they stand as the strings "NaN", "Infinity" and "-Infinity", which Python's `float`
reads back.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.files import write_atomically

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""What a line holds: plain values by name, of the types that its writer gave them."""


def plain(value: object) -> Any:
    """The value as JSON and trackers take it: arrays and tensors as numbers or lists, the unknown as its text."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def json_line(values: Mapping[str, object]) -> bytes:
    """One line, its end included.

    >>> json_line({"step": 3, "loss": float("nan")})
    b'{"step": 3, "loss": "NaN"}\\n'
    """
    text = json.dumps(_without_non_finite(plain(values)), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def read_line(line: bytes) -> Row | None:
    """The row of a line; None if it is no object of JSON, such as a line that was not written to its end."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def row_of_step(line: bytes) -> Row | None:
    """The row of a line that belongs to a step, or None if it was not written to its end."""
    row = read_line(line)
    return row if row is not None and "step" in row and line.endswith(b"\n") else None


def cut_back(path: Path, resume_step: int) -> list[Row]:
    """Keep the lines up to `resume_step`; gives their rows. A crash on the way leaves the old file."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [(line, row) for line in lines if (row := row_of_step(line)) and row["step"] <= resume_step]
    if len(kept) < len(lines):
        write_atomically(path, b"".join(line for line, _ in kept))
        logger.info("cut %d lines after step %d off %s", len(lines) - len(kept), resume_step, path)
    last_step = kept[-1][1]["step"] if kept else None
    if last_step != resume_step:
        logger.warning("%s has no line of step %d, the step resumed from; its last is %s", path, resume_step, last_step)
    return [row for _, row in kept]


def is_number(value: object) -> bool:
    """Whether it is a number, or one of the texts that stand for NaN and infinity."""
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")


def finite(value: object) -> float | None:
    """The number; None for all that is no finite number.

    >>> finite(3), finite("Infinity"), finite("3"), finite(None)
    (3.0, None, None, None)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _without_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return value
