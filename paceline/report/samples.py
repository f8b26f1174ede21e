"""A few responses of every step, with prompt and score, in samples/<step>.jsonl: enough to see what is rewarded.

A line is a row of `dumps.generation_rows` with `"kind": "training"` or `"validation"`. Texts are cut in the middle, so
that the files of a long run stay small; all responses in full are `trainer.rollout_data_dir`'s and
`trainer.validation_data_dir`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.files import keep_old, write_atomically
from paceline.report.json_lines import Row, json_line, read_line

TOKENS = "tokens"
"""A list of them, which is kept short by whoever makes it."""
LONGEST_TEXT = 4000
"""Characters kept of a text."""
SHOWN_TEXTS = ("data_source", "prompt", "response", "ground_truth")
_LONGEST_GROUND_TRUTH = 500
"""Characters shown: the tests of a programming task may be megabytes."""


class SampleFiles:
    """Writes the files of one run. `count` is how many responses of a step are kept, and as many of its validation.

    A run that resumes at a step removes what came after it: those steps come again.
    """

    def __init__(self, folder: Path, count: int, resume_step: int | None) -> None:
        self._folder = folder
        self._count = count
        self._validation: list[Mapping[str, object]] = []
        if resume_step is None:
            keep_old(folder)
            return
        for step, path in sample_files(folder).items():
            if step > resume_step:
                path.unlink()

    def choose(self, rows: int) -> list[int]:
        """Which of so many rows are kept."""
        return evenly_chosen(rows, self._count)

    def add_validation(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Responses of a validation, for the next `write`."""
        self._validation = [rows[row] for row in self.choose(len(rows))]

    def write(self, step: int, training: Sequence[Mapping[str, object]] = ()) -> None:
        """The file of a step: its training responses, already chosen, and those of its validation."""
        kinds = {"training": training, "validation": self._validation}
        rows = [
            {"kind": kind} | {name: value if name == TOKENS else cut_value(value) for name, value in row.items()}
            for kind, of_kind in kinds.items()
            for row in of_kind
        ]
        self._validation = []
        if rows:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{step}.jsonl", b"".join(map(json_line, rows)))


def evenly_chosen(rows: int, most: int) -> list[int]:
    """At most so many of the rows, evenly, so that they are of different prompts and the same at each validation.

    >>> evenly_chosen(10, 4)
    [0, 2, 5, 7]
    """
    count = min(rows, most)
    return [place * rows // count for place in range(count)]


def sample_files(folder: Path) -> dict[int, Path]:
    """Step to file, in order."""
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdigit()}
    return dict(sorted(files.items()))


def read_samples(path: Path) -> Iterator[Row]:
    """The rows of one file; lines that can't be read are skipped."""
    for line in path.read_bytes().splitlines():
        if (row := read_line(line)) is not None:
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


def cut_value(value: object, longest: int = LONGEST_TEXT) -> object:
    """A number as it is, all else as text if it is too long: the tests of a programming task may be megabytes.

    Of the turns of a conversation, each text is cut.
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) and "by" in item for item in value):
        return [{name: cut_value(part, longest) for name, part in item.items()} for item in value]
    is_small = value is None or isinstance(value, bool | int | float)
    return value if is_small or len(str(value)) <= longest else cut_text(str(value), longest)


def shown_texts(row: Mapping[str, object]) -> dict[str, str]:
    """The texts of a response that people look at, by `SHOWN_TEXTS`."""
    texts = {name: str(row[name]) for name in SHOWN_TEXTS}
    return texts | {"ground_truth": texts["ground_truth"][:_LONGEST_GROUND_TRUTH]}


def as_text(row: Row) -> str:
    """The same as one text, with the score."""
    return "\n".join([*(f"[{name}] {text}" for name, text in shown_texts(row).items()), f"[score] {row['score']:g}"])
