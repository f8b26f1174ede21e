"""From run folders to the page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.config.describe import description
from paceline.config.keys import walk_keys
from paceline.errors import DataError
from paceline.report.files import write_atomically
from paceline.report.page.read import Limits, read_run

PAGE_FILE = "report.html"


def write_page(folders: Sequence[Path], output: Path, steps: Iterable[int] = ()) -> int:
    """Write the page of these runs, with the `steps` among those that it shows one by one; gives its size in bytes."""
    page = render(page_data(folders, steps)).encode(errors="replace")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return len(page)


def page_data(folders: Sequence[Path], steps: Iterable[int] = ()) -> dict[str, Any]:
    """What the page shows. Several runs share the room of one."""
    limits = Limits.shared_by(len(folders), steps)
    names = run_names(folders)
    runs = [read_run(folder, name, limits) for folder, name in zip(folders, names, strict=True)]
    shown = {part["step"] for run in runs for part in (*run["gantt"]["steps"], *run["samples"])}
    if missing := sorted(limits.steps - shown):
        raise DataError(
            f"No run has a timeline or samples of step {', '.join(map(str, missing))}; there are steps "
            f"{min(shown, default=0)} to {max(shown, default=0)}."
        )
    return {
        "runs": runs,
        "meanings": {key.name: description(key) for key in walk_keys() if not key.is_section},
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


def render(data: dict[str, Any]) -> str:
    """The page. `<` stands escaped in the data, so no text of a run can end the script that holds them."""
    files = resources.files("paceline.report.page")
    template, style, script = (
        (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    encoded = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    # The data last: nothing in them is taken for a place to fill.
    return template.replace("{{style}}", style).replace("{{script}}", script).replace("{{data}}", encoded)
