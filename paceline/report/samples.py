"""A few responses of every step, with prompt and score, in samples/<step>.jsonl: enough to see what is rewarded.

A line is a row of `dumps.generation_rows` with `"kind": "training"` or `"validation"`. Texts are cut in the middle, so
that the files of a long run stay small; all responses in full are `trainer.rollout_data_dir`'s and
`trainer.validation_data_dir`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.files import keep_old, write_atomically
from paceline.report.json_lines import json_line

LONGEST_TEXT = 4000
"""Characters kept of a text."""


class SampleFiles:
    """Writes the files of one run. `count` is how many responses of a step are kept, and as many of its validation.

    A run that resumes at a step removes what came after it: those steps come again.
    """

    def __init__(self, folder: Path, count: int, resume_step: int | None) -> None:
        self._folder = folder
        self._count = count
        self._validation: list[Mapping[str, Any]] = []
        if resume_step is None:
            keep_old(folder)
            return
        for step, path in sample_files(folder).items():
            if step > resume_step:
                path.unlink()

    def choose(self, rows: int) -> list[int]:
        """Which of so many rows are kept: spread evenly, so that they are of different prompts."""
        count = min(self._count, rows)
        return [place * rows // count for place in range(count)]

    def add_validation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Responses of a validation, for the next `write`."""
        self._validation = [rows[row] for row in self.choose(len(rows))]

    def write(self, step: int, training: Sequence[Mapping[str, Any]] = ()) -> None:
        """The file of a step: its training responses, already chosen, and those of its validation."""
        rows = [{"kind": "training", **row} for row in training]
        rows += [{"kind": "validation", **row} for row in self._validation]
        self._validation = []
        if rows:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{step}.jsonl", b"".join(json_line(_cut(row)) for row in rows))


def sample_files(folder: Path) -> dict[int, Path]:
    """Step to file, in order."""
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdigit()}
    return dict(sorted(files.items()))


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file; lines that can't be read are passed over."""
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def cut_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """The start and the end of a text that is too long.

    >>> cut_text("0123456789" * 10, longest=20)
    '0123456789 [80 characters left out] 0123456789'
    """
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


def _cut(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cut_text(value) if isinstance(value, str) else _bounded(value) for name, value in row.items()}


def _bounded(value: Any) -> Any:
    """The tests of a programming task may be megabytes."""
    is_small = value is None or isinstance(value, bool | int | float)
    return value if is_small or len(str(value)) <= LONGEST_TEXT else cut_text(str(value))
