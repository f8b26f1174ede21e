"""What has to be true for an answer to be right, down to pairs of expressions; and from their verdicts, its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Verdict = bool | None | str
"""Right or wrong; None for a timeout; a message for a failure of the grader."""


class Pair(NamedTuple):
    """Two expressions, in LaTeX, that math-verify has to find equal."""

    gold: str
    answer: str


@dataclass(frozen=True)
class AllOf:
    """All of these are true."""

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class OneOf:
    """One of these is true."""

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Matching:
    """Each item of the gold answer, a row, has an item of the answer to itself, a column."""

    rows: tuple[tuple[Check, ...], ...]


Check = Verdict | Pair | AllOf | OneOf | Matching
"""What has to be true for an answer to be right; or the verdict itself."""


def open_pairs(check: Check) -> Iterator[Pair]:
    """The pairs that mathematics has to decide."""
    if isinstance(check, Pair):
        yield check
    elif isinstance(check, AllOf | OneOf):
        for part in check.checks:
            yield from open_pairs(part)
    elif isinstance(check, Matching):
        for row in check.rows:
            for part in row:
                yield from open_pairs(part)


def settle(check: Check, verdicts: Mapping[Pair, Verdict]) -> Verdict:
    """The verdict on an answer from those on its pairs; a timeout or a failure counts where the answer hangs on it."""
    if check is None or isinstance(check, bool | str):
        return check
    if isinstance(check, Pair):
        return verdicts[check]
    if isinstance(check, Matching):
        return _settle_matching([[settle(part, verdicts) for part in row] for row in check.rows])
    parts = [settle(part, verdicts) for part in check.checks]
    decisive = isinstance(check, OneOf)
    if decisive in [part for part in parts if isinstance(part, bool)]:
        return decisive
    return next((part for part in parts if not isinstance(part, bool)), not decisive)


def _settle_matching(rows: list[list[Verdict]]) -> Verdict:
    if _matches([[part is True for part in row] for row in rows]):
        return True
    if not _matches([[part is not False for part in row] for row in rows]):
        return False
    return next(part for row in rows for part in row if not isinstance(part, bool))


def _matches(allowed: list[list[bool]]) -> bool:
    """Whether every row has a column of its own."""
    row_of: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, fits in enumerate(allowed[row]):
            if fits and column not in seen:
                seen.add(column)
                if column not in row_of or place(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(allowed)))
