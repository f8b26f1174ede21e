"""Speeds of several ways to do the same work, measured in turns, so that other work on the machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def print_header() -> None:
    """Above the lines of `compare`."""
    print(f"{'':<28}{'tokens/s':>10}{'quartiles':>20}{'ratio':>8}")


def take_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way; every second turn goes backwards, so that none always follows the same other."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in ways if turn % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name]()
            if turn:  # The first is for warming up.
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(workload: str, ways: Mapping[str, Callable[[], object]], *, tokens: int, repeats: int) -> None:
    """Run all ways `repeats` times; prints the median and the quartiles of each, and its ratio to the first way."""
    taken = take_turns(ways, repeats)
    speeds = {name: [tokens / value for value in seconds] for name, seconds in taken.items()}
    baseline = statistics.median(next(iter(speeds.values())))
    for name, values in speeds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        quartiles = f"{low:,.0f} .. {high:,.0f}"
        print(f"{workload + ' ' + name:<28}{middle:10,.0f}{quartiles:>20}{middle / baseline:8.2f}", flush=True)


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
