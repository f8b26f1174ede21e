"""Thresholds of rollout correction as people write them: "2.0", "0.5_2.0", and lists of them with commas."""

from __future__ import annotations

import math
from typing import get_args

from paceline.catalog import RejectionCriterion
from paceline.errors import ConfigError
from paceline.text import unknown_choice

CRITERIA = get_args(RejectionCriterion)

Bounds = tuple[float | None, float]
"""The lower one, if there is one, and the upper one."""


def read_bounds(value: str | float) -> Bounds:
    """An upper bound, or both with "_" between them.

    >>> read_bounds(2.0), read_bounds("2.0"), read_bounds("0.5_2.0")
    ((None, 2.0), (None, 2.0), (0.5, 2.0))
    """
    low, between, high = str(value).strip().partition("_")
    try:
        bounds = (float(low), float(high.replace("_", "x"))) if between else (None, float(low))
    except ValueError:
        bounds = (None, math.nan)
    smallest = bounds[1] if bounds[0] is None else bounds[0]
    if not (0 < smallest <= bounds[1] < math.inf):
        raise ConfigError(f"{value} is not a threshold: write a number above 0, or two as low_up, such as 0.5_2.0.")
    return bounds


def read_rejections(criteria: str | list[str] | None, thresholds: str | float | None) -> list[tuple[str, float, float]]:
    """Each criterion once, with its bounds: of r for k1, where one number up stands for (1 / up, up), else of k.

    >>> read_rejections("token_k1,seq_max_k2", "0.6_1.6,2.5")
    [('token_k1', 0.6, 1.6), ('seq_max_k2', 0.0, 2.5)]
    >>> read_rejections(["seq_mean_k1"], 2.0)
    [('seq_mean_k1', 0.5, 2.0)]
    """
    names = _split(criteria)
    if not names:
        return []
    for name in names:
        if name not in CRITERIA:
            raise ConfigError(unknown_choice("rollout_rs", name, CRITERIA))
    texts = _split(str(thresholds)) if thresholds is not None else []
    texts = texts * len(names) if len(texts) == 1 else texts
    if len(texts) != len(names):
        raise ConfigError(
            f"{len(texts)} thresholds for {len(names)} criteria of rollout_rs ({', '.join(names)}): set one for all, "
            "or one for each, with commas between them."
        )
    found: dict[str, tuple[str, float, float]] = {}
    for name, text in zip(names, texts, strict=True):
        low, high = read_bounds(text)
        if name.endswith("k1"):
            bounds = (1 / high if low is None else low, high)
            if not bounds[0] <= bounds[1]:
                raise ConfigError(
                    f"{text} is not a threshold of {name}: one number up stands for 1/up_up, so set it to 1 or more."
                )
        elif low is not None:
            raise ConfigError(
                f"{text} is not a threshold of {name}, which is never negative: write the upper bound alone."
            )
        else:
            bounds = (0.0, high)
        found.setdefault(name, (name, *bounds))
    return list(found.values())


def _split(texts: str | list[str] | None) -> list[str]:
    parts = [texts] if isinstance(texts, str) else texts or []
    return [name.strip() for part in parts for name in part.split(",") if name.strip()]
