"""From run folders to the page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from paceline.config import ROOTS
from paceline.config.describe import description
from paceline.config.keys import walk_keys
from paceline.errors import DataError
from paceline.files import write_atomically
from paceline.report.json_lines import Row
from paceline.report.page.read import Limits, read_run

PAGE_FILE = "report.html"
NAMES_OF_RUNS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Keys that differ between runs without making them different."""
KEYS_IN_NAME = 3
LONGEST_VALUE_IN_NAME = 24
STATIC_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LIVE_POLICY = f"{STATIC_POLICY}; connect-src 'self'"


def write_page(folders: Sequence[Path], output: Path, steps: Iterable[int] = ()) -> int:
    """Write the page of these runs, with the `steps` among those that it shows one by one; gives its size in bytes."""
    page = render(page_data(folders, steps)).encode(errors="replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return len(page)


def page_data(folders: Sequence[Path], steps: Iterable[int] = ()) -> Row:
    """What the page shows. Several runs share the room of one."""
    limits = Limits.shared_by(len(folders), steps)
    names = run_names(folders)
    runs = [read_run(folder, name, limits) for folder, name in zip(folders, names, strict=True)]
    for run, what in zip(runs, differences([run["config"] for run in runs]), strict=True):
        run["differs"] = what
    shown = {part["step"] for run in runs for part in (*run["gantt"]["steps"], *run["samples"])}
    if missing := sorted(limits.steps - shown):
        raise DataError(
            f"No run has a timeline or samples of step {', '.join(map(str, missing))}; there are steps "
            f"{min(shown, default=0)} to {max(shown, default=0)}."
        )
    return {
        "runs": runs,
        "meanings": {
            key.name: description(key)
            for root in reversed(ROOTS)  # PPO's own words last, where several have a key
            for key in walk_keys(root())
            if not key.is_section
        },
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def run_names(folders: Sequence[Path]) -> list[str]:
    """As many last parts of each path as it takes to tell them apart.

    >>> run_names([Path("/runs/a/ppo"), Path("/runs/b/ppo")])
    ['a/ppo', 'b/ppo']
    """
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise DataError(f"the same run was named twice: {', '.join(map(str, folders))}")


def differences(configs: Sequence[Sequence[tuple[str, str, str, bool]]]) -> list[str]:
    """For each run, its values of the first keys in which the configurations differ; empty where there are none.

    >>> differences([[("trainer.seed", "1", "1", False)], [("trainer.seed", "2", "1", True)]])
    ['seed=1', 'seed=2']
    """
    values = [{key: value for key, value, *_ in rows} for rows in configs]
    keys = dict.fromkeys(key for known in values for key in known if key not in NAMES_OF_RUNS)
    differing = [key for key in keys if len({_short(known.get(key)) for known in values}) > 1]
    # What the run learns and how comes before what it is made of.
    differing.sort(key=lambda key: key.startswith("data."))
    shown, rest = differing[:KEYS_IN_NAME], len(differing) - KEYS_IN_NAME
    short = [key.rpartition(".")[2] for key in shown]
    short = [key if short.count(name) > 1 else name for key, name in zip(shown, short, strict=True)]
    more = [f"{rest} more"] if rest > 0 else []
    return [
        ", ".join([*(f"{name}={_short(known.get(key))}" for key, name in zip(shown, short, strict=True)), *more])
        for known in values
    ]


def _short(value: str | None) -> str:
    """A value for a name: of a path the last part."""
    text = (value or "–").rstrip("/").rpartition("/")[2]
    return text if len(text) <= LONGEST_VALUE_IN_NAME else f"{text[: LONGEST_VALUE_IN_NAME - 1]}…"


def render(data: Row, policy: str = STATIC_POLICY) -> str:
    """The page. `<` stands escaped in the data, so no text of a run can end the script that holds them."""
    files = resources.files("paceline.report.page")
    template, style, *scripts = (
        (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js", "live.js")
    )
    script = "\n".join(scripts)
    encoded = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    # The data last: nothing in them is taken for a place to fill.
    filled = template.replace("{{policy}}", policy).replace("{{style}}", style).replace("{{script}}", script)
    return filled.replace("{{data}}", encoded)
