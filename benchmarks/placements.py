"""Draws docs/images/placements.svg: the same training by placement and overlap, from the timelines of three real runs.

PPO with reference and reward model on two CPU cores. Colocated, one device has both cores and the roles take turns on
it; split, each pool has one core, and its calls run one after another (trainer.overlap=none) or side by side. Three
steps in the middle of each run are drawn to one scale of time.

    python -m benchmarks.placements --output docs/images/placements.svg
"""

from __future__ import annotations

import argparse
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.overlap import PHASES, make_material, run
from paceline.report.page.gantt import read_gantt

SPLIT: dict[str, Any] = {"n_gpus_per_node": 2, "threads_per_worker": 1, "placement": {"name": "split"}}
RUNS: dict[str, dict[str, Any]] = {
    "colocated": {"n_gpus_per_node": 1, "threads_per_worker": 2, "placement": {"name": "colocated"}},
    "split, without overlap": {**SPLIT, "overlap": "none"},
    "split": SPLIT,
}
COLORS = {
    "rollout": "#4269d0",
    "log-probs": "#6cc5b0",
    "reference": "#3ca951",
    "values": "#efb118",
    "reward model": "#ff725c",
    "actor's update": "#7b5fc7",
    "critic's update": "#a463f2",
}
STEPS = (3, 4, 5)
WIDTH, LEFT, ROW, GAP = 1000, 190, 30, 10

Bar = tuple[str, str, float, float, int]
"""Pool, phase, start and end in seconds, step."""


def bars_of(run_dir: Path) -> list[Bar]:
    """The bars of the drawn steps, from the rollout of the first."""
    gantt = read_gantt(run_dir, range(1, STEPS[-1] + 2), 100)
    bars = {
        (pool, PHASES[method], start, end, step)
        for shown in gantt["steps"]
        for pool, method, start, end, step, _ in shown["bars"]
        if step in STEPS and PHASES.get(method) in COLORS
    }
    origin = min(bar[2] for bar in bars)
    return sorted((pool, phase, start - origin, end - origin, step) for pool, phase, start, end, step in bars)


def draw(runs: dict[str, list[Bar]]) -> str:
    """An SVG with a row for each pool of each run; idle time stays grey."""
    longest = max(bar[3] for bars in runs.values() for bar in bars)
    scale = (WIDTH - LEFT - 10) / longest
    shapes: list[str] = []
    top = 10.0
    for name, bars in runs.items():
        seconds = max(bar[3] for bar in bars)
        shapes.append(_text(10, top + 14, f"{name}: {len(STEPS)} steps in {seconds:.1f} s", bold=True))
        top += 24
        for pool in sorted({bar[0] for bar in bars}):
            shapes.append(_text(10, top + ROW / 2 + 4, pool))
            shapes.append(_box(LEFT, top, seconds * scale, "#88888833", f"{pool}, idle where nothing else is drawn"))
            for _, phase, start, end, step in (bar for bar in bars if bar[0] == pool):
                title = f"{phase} of step {step}: {end - start:.2f} s"
                shapes.append(_box(LEFT + start * scale, top, (end - start) * scale, COLORS[phase], title))
            top += ROW + GAP
        top += GAP
    x = 10.0
    for phase, color in COLORS.items():
        shapes.append(f'<rect x="{x}" y="{top}" width="14" height="14" rx="2" fill="{color}"/>')
        shapes.append(_text(x + 19, top + 12, phase))
        x += 40 + 7.5 * len(phase)
    height = top + 26
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1f2328}.bold{font-weight:600}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">'
        f"<style>{style}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, bold: bool = False) -> str:
    kind = ' class="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{kind}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, color: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(width, 0.5):.1f}" height="{ROW}" rx="2" fill="{color}">'
    return f"{shape}<title>{escape(title)}</title></rect>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("placements.svg"))
    parser.add_argument("--responses", type=int, default=64, help="per step")
    parser.add_argument("--tokens", type=int, default=192, help="per response")
    parser.add_argument("--hidden", type=int, default=320, help="width of the models")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_material(folder, args.hidden)
        runs = {
            name: bars_of(run(folder, f"run-{number}", STEPS[-1] + 2, args.responses, args.tokens, **trainer))
            for number, (name, trainer) in enumerate(RUNS.items())
        }
    args.output.write_text(draw(runs))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
