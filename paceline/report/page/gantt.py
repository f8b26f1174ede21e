"""Which pool did what when in a step, from the timeline: the calls of all ranks of a pool joined to bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.report.json_lines import Row, read_line
from paceline.report.page.thin import spread
from paceline.report.timeline import DRIVER, Span, merge_spans
from paceline.run_folder import TIMELINE_FILE

MOST_BARS = 200
"""Of one step."""
SAID = ("version", "prompts")
"""What the page says of a bar besides its name: whose weights sampled, or were made; how many prompts were admitted."""
BarKey = tuple[str, str, bool, str]
"""Pool, method, whether it is validation, and what more is said: spans of which all is equal are joined."""


def read_gantt(folder: Path, steps: Sequence[int], most_steps: int, in_any_case: frozenset[int] = frozenset()) -> Row:
    """The bars of at most so many of the steps, evenly spread, and of some that are wanted in any case.

    `pools` has the processes and roles of each pool. A step has `start`, `end` (seconds from the first event of all)
    and `bars`: (pool, method, start, end, step, whether it is validation, what more is said of it), those of its
    neighbours that reach into it included.
    """
    chosen = set(spread(sorted(set(steps) | {0}), most_steps)) | (in_any_case & set(steps))
    wanted = chosen | {step + 1 for step in chosen} | {step - 1 for step in chosen}
    calls: dict[int, dict[BarKey, list[Span]]] = {}
    pools: dict[str, tuple[set[int], set[str]]] = {}
    for path in _timelines(folder):
        known = set(calls)  # of newer sessions: a step that was repeated after a resume is the newer one's
        for event in _events(path):
            args = event.get("args", {})
            pool, step = str(args.get("pool", DRIVER)), args.get("step")
            if step not in wanted or step in known:
                continue
            ranks, roles = pools.setdefault(pool, (set(), set()))
            ranks.add(args.get("rank", 0))
            roles.add(str(args.get("role", DRIVER)))
            start = event["ts"] / 1e6
            about = ", ".join(f"{name} {args[name]}" for name in SAID if name in args)
            key = (pool, str(event["name"]), bool(args.get("validation")), about)
            calls.setdefault(step, {}).setdefault(key, []).append((start, start + event["dur"] / 1e6))
        if chosen <= set(calls) or 1 in calls:  # a session with the first step did not go on from an older one
            break
    return _as_data(calls, pools, sorted(chosen & set(calls)))


def _as_data(
    calls: dict[int, dict[BarKey, list[Span]]],
    pools: dict[str, tuple[set[int], set[str]]],
    steps: list[int],
) -> Row:
    bars = {
        step: [
            (pool, method, start, end, step, validation, about)
            for (pool, method, validation, about), spans in of_step.items()
            for start, end in merge_spans(spans)
        ]
        for step, of_step in calls.items()
    }
    origin = min((bar[2] for of_step in bars.values() for bar in of_step), default=0.0)
    shown = []
    for step in steps:
        # The driver waits through whole phases of others; workers say when a step begins and ends.
        own = [bar for bar in bars[step] if bar[0] != DRIVER] or bars[step]
        start, end = min(bar[2] for bar in own), max(bar[3] for bar in own)
        near = [bar for other in (step - 1, step, step + 1) for bar in bars.get(other, ())]
        inside = sorted((bar for bar in near if bar[3] > start and bar[2] < end), key=lambda bar: bar[2])[:MOST_BARS]
        shown.append(
            {
                "step": step,
                "start": round(start - origin, 4),
                "end": round(end - origin, 4),
                "bars": [(p, m, round(s - origin, 4), round(e - origin, 4), *rest) for p, m, s, e, *rest in inside],
            }
        )
    return {
        "pools": {
            pool: {"processes": len(ranks), "roles": sorted(roles)}
            for pool, (ranks, roles) in sorted(pools.items(), key=lambda item: (item[0] == DRIVER, item[0]))
        },
        "steps": shown,
    }


def _timelines(folder: Path) -> list[Path]:
    """The newest first: timeline.json, then what resumed runs put aside, highest number first."""
    numbered = [path for path in folder.glob("timeline.*.json") if path.suffixes[-2][1:].isdigit()]
    newest = [folder / TIMELINE_FILE] if (folder / TIMELINE_FILE).is_file() else []
    return newest + sorted(numbered, key=lambda path: int(path.suffixes[-2][1:]), reverse=True)


def _events(path: Path) -> Iterator[Row]:
    """The spans of a timeline, line by line: the file may be large, and its end may be missing."""
    with path.open("rb") as file:
        for line in file:
            # None is the head, the tail, or a line that was not written to its end.
            event = read_line(line.strip().removesuffix(b","))
            if event is not None and event.get("ph") == "X" and {"ts", "dur", "name"} <= set(event):
                yield event
