"""The one table that all benchmarks write: medians, quartiles, and ratios of medians.

Each benchmark prints its part. Where RECORDS names a file the part is also added to it, from which `python -m
benchmarks` makes the whole table. Imports nothing but the standard library, since peers run in environments of theirs.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = "PACELINE_BENCHMARK_RECORDS"


def report(work: str, measured: Mapping[str, Sequence[float]], unit: str, *, of: str | None) -> None:
    """Median and quartiles of each way to do the work, and how many times as much `of` has as each of the others.

    `of` is None for figures that are not compared.
    """
    own = statistics.median(measured[of]) if of else 0.0
    print(f"\n{work:<48}{unit:>12}{'quartiles':>22}{of + ' /' if of else '':>24}")
    lines = []
    for name, values in measured.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
        ratio = "" if of in (name, None) else f"{own / middle:.2f}"
        lines.append([name, _short(middle), f"{_short(low)} .. {_short(high)}", ratio])
        print(f"  {name:<46}{lines[-1][1]:>12}{lines[-1][2]:>22}{ratio:>24}", flush=True)
    _record({"work": work, "unit": unit, "of": of, "lines": lines})


def remark(text: str) -> None:
    """Something that a reader of the figures must know, or a figure that has nothing beside it."""
    print(text, flush=True)
    _record({"remark": text})


def markdown(records: Path) -> Iterator[str]:
    """The lines of the table, the remarks behind it."""
    entries = [json.loads(line) for line in records.read_text().splitlines()]
    yield "| | | median | quartiles | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for entry in entries:
        if "work" in entry:
            for number, (name, median, quartiles, ratio) in enumerate(entry["lines"]):
                work = f"{entry['work']} ({entry['unit']})" if number == 0 else ""
                shown = f"**{name}**" if name == entry["of"] else name
                yield f"| {work} | {shown} | {median} | {quartiles} | {ratio} |"
    yield ""
    yield from (f"- {entry['remark']}" for entry in entries if "remark" in entry)


def _record(entry: Mapping[str, Any]) -> None:
    if RECORDS in os.environ:
        with open(os.environ[RECORDS], "a") as file:
            file.write(json.dumps(entry) + "\n")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
