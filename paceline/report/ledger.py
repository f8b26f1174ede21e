"""The ledger of a run: each prompt of each epoch was trained once, or dropped for a reason that stands there.

A prompt is a place in the order of its epoch. ledger.jsonl has a line for each step, with ranges [epoch, first, stop]:

    {"step": 0, "starts": [0, 0], "prompts": 20, "waiting": 0}
    {"step": 1, "trained": [[0, 0, 8]]}
    {"step": 2, "trained": [[0, 8, 11], [0, 12, 17]], "dropped": {"filter_groups": [[0, 11, 12]]}}

A line with "starts" says where in the data the lines after it begin, how many prompts an epoch has, and how many were
waiting then: drawn before, and not yet trained. The ledger balances when what was drawn since is trained, dropped or
waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LedgerError
from paceline.files import append_whole, keep_old
from paceline.report.json_lines import Row, cut_back, json_line, row_of_step


class Prompts(NamedTuple):
    """Neighbours in the order of an epoch: places `first` to `stop`, which is not one of them."""

    epoch: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


class DataPosition(NamedTuple):
    """A place in the data: all places of earlier epochs, and those before it in its own, were drawn."""

    epoch: int
    place: int


class Account:
    """The sums of a ledger, line by line."""

    def __init__(self, lines: Iterable[Row] = ()) -> None:
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._start: tuple[DataPosition, int] | None = None
        self._open = 0  # that were waiting at the start, less those that were trained or dropped since
        for line in lines:
            self.add(line)

    def add(self, line: Row) -> None:
        if "starts" in line:
            self._start, self._open = (DataPosition(*line["starts"]), line["prompts"]), line["waiting"]
        trained = _count(line.get("trained", ()))
        dropped = {reason: _count(ranges) for reason, ranges in line.get("dropped", {}).items()}
        self.trained += trained
        self.dropped.update(dropped)
        self._open -= trained + sum(dropped.values())

    @property
    def is_empty(self) -> bool:
        """Whether no line said yet where it starts."""
        return self._start is None

    def missing(self, position: DataPosition, waiting: int) -> int:
        """Prompts that were drawn and are neither trained, dropped nor waiting; less than 0: too many are."""
        if self._start is None:
            return 0
        start, prompts = self._start
        drawn = (position.epoch - start.epoch) * prompts + position.place - start.place
        return drawn + self._open - waiting


class LedgerFile:
    """Writes the ledger of a run. `resume_step` as for the metrics: what comes again is cut off; None is a new run."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        self._step = resume_step or 0
        self._is_new = resume_step is None
        self.account = Account(cut_back(path, self._step) if not self._is_new and path.exists() else ())

    def start(self, position: DataPosition, *, prompts: int, waiting: int, again: bool = False) -> None:
        """Before the first step of a session. With `again`, the epoch begins again with other data.

        An older run may have trained without a ledger: it begins here.
        """
        if self._is_new:
            keep_old(self._path)
        if self.account.is_empty or again:
            self._append({"step": self._step, "starts": list(position), "prompts": prompts, "waiting": waiting})

    def write(self, step: int, trained: Sequence[Prompts], dropped: Mapping[str, Sequence[Prompts]]) -> None:
        """The line of a step."""
        reasons = {reason: [list(each) for each in ranges] for reason, ranges in dropped.items() if ranges}
        line: Row = {"step": step, "trained": [list(each) for each in trained]}
        self._append(line | ({"dropped": reasons} if reasons else {}))

    def require_balance(self, position: DataPosition, waiting: int) -> None:
        """An error if a prompt was lost or counted twice."""
        if missing := self.account.missing(position, waiting):
            what = "are neither trained, dropped nor waiting" if missing > 0 else "are accounted for twice"
            raise LedgerError(f"{self._path} does not balance: of the prompts drawn so far, {abs(missing)} {what}.")

    def _append(self, line: Row) -> None:
        with self._path.open("ab", buffering=0) as file:  # a line is one write, as in the metrics
            append_whole(file, json_line(line))
        self.account.add(line)


def read_ledger(path: Path) -> Account:
    """The sums of a run's ledger."""
    with path.open("rb") as file:
        return Account(row for line in file if (row := row_of_step(line)) is not None)


def ranges(places: Iterable[tuple[int, int]]) -> list[Prompts]:
    """Epochs and places as ranges, in their order.

    >>> ranges([(0, 1), (0, 2), (0, 5), (1, 6)])
    [Prompts(epoch=0, first=1, stop=3), Prompts(epoch=0, first=5, stop=6), Prompts(epoch=1, first=6, stop=7)]
    """
    found: list[Prompts] = []
    for epoch, place in sorted(places):
        if found and (found[-1].epoch, found[-1].stop) == (epoch, place):
            found[-1] = found[-1]._replace(stop=place + 1)
        else:
            found.append(Prompts(epoch, place, place + 1))
    return found


def _count(ranges: Iterable[Sequence[int]]) -> int:
    return sum(stop - first for _, first, stop in ranges)
