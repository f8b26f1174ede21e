"""The one form in which benchmarks print what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def print_ratios(title: str, measured: Mapping[str, Sequence[float]], unit: str, *, of: str) -> None:
    """Median and quartiles of each, and how many times as much `of` has as each of the others."""
    print(f"\n{title:<36}{unit:>12}{'quartiles':>22}{of + ' /':>14}")
    own = statistics.median(measured[of])
    for name, values in measured.items():
        low, middle, high = statistics.quantiles(values, n=4)
        quartiles = f"{_short(low)} .. {_short(high)}"
        ratio = "" if name == of else f"{own / middle:14.2f}"
        print(f"  {name:<34}{_short(middle):>12}{quartiles:>22}{ratio}", flush=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
