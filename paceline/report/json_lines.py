"""Values of any kind as lines of JSON.

JSON knows no NaN and no infinity: they stand as the strings "NaN", "Infinity" and "-Infinity", which Python's `float`
reads back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
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


def json_line(values: Mapping[str, Any]) -> bytes:
    """One line, its end included.

    >>> json_line({"step": 3, "loss": float("nan")})
    b'{"step": 3, "loss": "NaN"}\\n'
    """
    text = json.dumps(_without_non_finite(plain(values)), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return value
