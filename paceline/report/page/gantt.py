"""Which pool did what when in a step, from the timeline: the calls of all ranks of a pool joined to bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.report.json_lines import Row, read_line
from paceline.report.page.thin import spread
from paceline.report.timeline import DRIVER, Span, merge_spans
from paceline.run_folder import TIMELINE_FILE

Bar = tuple[str, str, float, float, int, bool, str]
"""Pool, method, start, end, step, whether it is validation, and what more is said."""
MOST_BARS = 200
"""Of one step."""
SAID = ("version", "prompts")
"""What the page says of a bar besides its name: whose weights sampled, or were made; how many prompts were admitted."""
BarKey = tuple[str, str, bool, str]
"""Pool, method, whether it is validation, and what more is said: spans of which all is equal are joined."""


class Calls:
    """The calls of some steps, as events of a timeline tell them."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[BarKey, list[Span]]] = {}
        self._pools: dict[str, tuple[set[int], set[str]]] = {}

    def add(self, event: Row) -> None:
        args = event.get("args", {})
        pool = str(args.get("pool", DRIVER))
        ranks, roles = self._pools.setdefault(pool, (set(), set()))
        ranks.add(args.get("rank", 0))
        roles.add(str(args.get("role", DRIVER)))
        start = event["ts"] / 1e6
        about = ", ".join(f"{name} {args[name]}" for name in SAID if name in args)
        key = (pool, str(event["name"]), bool(args.get("validation")), about)
        self.by_step.setdefault(args["step"], {}).setdefault(key, []).append((start, start + event["dur"] / 1e6))

    def forget_before(self, step: int) -> None:
        for older in [known for known in self.by_step if known < step]:
            del self.by_step[older]

    def data(self, steps: Sequence[int]) -> Row:
        """`pools` and `steps` as `read_gantt` gives them."""
        bars = {
            step: [
                (pool, method, start, end, step, validation, about)
                for (pool, method, validation, about), spans in of_step.items()
                for start, end in merge_spans(spans)
            ]
            for step, of_step in self.by_step.items()
        }
        origin = min((bar[2] for of_step in bars.values() for bar in of_step), default=0.0)
        return {
            "pools": {
                pool: {"processes": len(ranks), "roles": sorted(roles)}
                for pool, (ranks, roles) in sorted(self._pools.items(), key=lambda item: (item[0] == DRIVER, item[0]))
            },
            "steps": [_step_data(step, bars, origin) for step in steps],
        }


def read_gantt(folder: Path, steps: Sequence[int], most_steps: int, in_any_case: frozenset[int] = frozenset()) -> Row:
    """The bars of at most so many of the steps, evenly spread, and of some that are wanted in any case.

    `pools` has the processes and roles of each pool. A step has `start`, `end` (seconds from the first event of all)
    and `bars`: (pool, method, start, end, step, whether it is validation, what more is said of it), those of its
    neighbours that reach into it included.
    """
    chosen = set(spread(sorted(set(steps) | {0}), most_steps)) | (in_any_case & set(steps))
    wanted = chosen | {step + 1 for step in chosen} | {step - 1 for step in chosen}
    calls = Calls()
    for path in _timelines(folder):
        known = set(calls.by_step)  # of newer sessions: a step that was repeated after a resume is the newer one's
        for event in _events(path):
            step = event.get("args", {}).get("step")
            if step in wanted and step not in known:
                calls.add(event)
        if chosen <= set(calls.by_step) or 1 in calls.by_step:  # with its first step a session is no resumed one
            break
    return calls.data(sorted(chosen & set(calls.by_step)))


def _step_data(step: int, bars: Mapping[int, list[Bar]], origin: float) -> Row:
    # The driver waits through whole phases of others; workers say when a step begins and ends.
    own = [bar for bar in bars[step] if bar[0] != DRIVER] or bars[step]
    start, end = min(bar[2] for bar in own), max(bar[3] for bar in own)
    near = [bar for other in (step - 1, step, step + 1) for bar in bars.get(other, ())]
    inside = sorted((bar for bar in near if bar[3] > start and bar[2] < end), key=lambda bar: bar[2])[:MOST_BARS]
    return {
        "step": step,
        "start": round(start - origin, 4),
        "end": round(end - origin, 4),
        "bars": [(p, m, round(s - origin, 4), round(e - origin, 4), *rest) for p, m, s, e, *rest in inside],
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
            if (event := span_in(line)) is not None:
                yield event


def span_in(line: bytes) -> Row | None:
    """The span of a line; None for the head, the tail, names of rows, and a line that was not written to its end."""
    event = read_line(line.strip().removesuffix(b","))
    is_span = event is not None and event.get("ph") == "X" and {"ts", "dur", "name"} <= set(event)
    return event if is_span else None
