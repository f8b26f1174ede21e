"""Less of what is too much, evenly."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def spread(items: list[T], most: int) -> list[T]:
    """At most so many of the items, evenly spread, first and last included.

    >>> spread([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def thinned(steps: list[int], values: list[float | None], most: int) -> tuple[list[int], list[float | None]]:
    """At most so many points: of each bucket the last step and the mean of its finite values.

    >>> thinned([1, 2, 3, 4], [1.0, 3.0, None, 5.0], most=2)
    ([2, 4], [2.0, 5.0])
    """
    if len(steps) <= most:
        return steps, [_rounded(value) for value in values]
    bounds = [place * len(steps) // most for place in range(most + 1)]
    kept: list[float | None] = []
    for start, end in pairwise(bounds):
        numbers = [value for value in values[start:end] if value is not None]
        kept.append(_rounded(statistics.fmean(numbers)) if numbers else None)
    return [steps[end - 1] for end in bounds[1:]], kept


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
