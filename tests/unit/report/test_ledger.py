"""Each prompt of each epoch is trained once, or dropped for a reason that stands there."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LedgerError
from paceline.report.ledger import DataPosition, LedgerFile, Prompts, ranges, read_ledger


def opened(path: Path, resume_step: int | None = None, position: tuple[int, int] = (0, 0), waiting: int = 0):
    ledger = LedgerFile(path, resume_step)
    ledger.start(DataPosition(*position), prompts=10, waiting=waiting)
    return ledger


def test_a_ledger_balances_when_all_that_was_drawn_is_trained_dropped_or_waiting(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl")
    ledger.write(1, [Prompts(0, 0, 4)], {})
    ledger.write(2, [Prompts(0, 4, 5), Prompts(0, 6, 8)], {"filter_groups": [Prompts(0, 5, 6)], "not_finite": []})
    ledger.require_balance(DataPosition(0, 8), waiting=0)
    ledger.require_balance(DataPosition(1, 4), waiting=6)
    with pytest.raises(LedgerError, match="2 are neither trained, dropped nor waiting"):
        ledger.require_balance(DataPosition(1, 0), waiting=0)
    with pytest.raises(LedgerError, match="1 are accounted for twice"):
        ledger.require_balance(DataPosition(0, 8), waiting=1)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "starts": [0, 0], "prompts": 10, "waiting": 0},
        {"step": 1, "trained": [[0, 0, 4]]},
        {"step": 2, "trained": [[0, 4, 5], [0, 6, 8]], "dropped": {"filter_groups": [[0, 5, 6]]}},
    ]
    account = read_ledger(tmp_path / "ledger.jsonl")
    assert (account.trained, dict(account.dropped)) == (7, {"filter_groups": 1})


def test_what_comes_again_after_a_resume_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    for step in (1, 2, 3):
        ledger.write(step, [Prompts(0, step - 1, step)], {})
    with path.open("ab") as file:
        file.write(b'{"step": 4, "trai')  # a kill in the middle of a line
    again = opened(path, resume_step=2, position=(0, 4), waiting=2)
    again.require_balance(DataPosition(0, 4), waiting=2)
    again.write(3, [Prompts(0, 2, 3)], {})
    again.require_balance(DataPosition(0, 4), waiting=1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_run_from_another_ones_checkpoint_begins_where_that_was(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl", position=(3, 7), waiting=2)
    ledger.require_balance(DataPosition(3, 7), waiting=2)
    ledger.write(5, [Prompts(3, 5, 7)], {})
    ledger.require_balance(DataPosition(3, 9), waiting=2)


def test_a_run_that_began_without_a_ledger_gets_one_from_where_it_goes_on(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.jsonl", resume_step=6, position=(1, 2))
    ledger.require_balance(DataPosition(1, 2), waiting=0)
    assert json.loads((tmp_path / "ledger.jsonl").read_text())["step"] == 6


def test_an_epoch_that_begins_again_with_other_data_is_a_new_start(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    opened(path).write(1, [Prompts(0, 0, 4)], {})
    ledger = LedgerFile(path, resume_step=1)
    ledger.start(DataPosition(0, 0), prompts=30, waiting=0, again=True)
    ledger.write(2, [Prompts(0, 0, 4)], {})
    ledger.require_balance(DataPosition(0, 4), waiting=0)
    assert read_ledger(path).trained == 8


def test_the_ledger_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    opened(tmp_path / "ledger.jsonl").write(1, [Prompts(0, 0, 1)], {})
    opened(tmp_path / "ledger.jsonl").require_balance(DataPosition(0, 0), waiting=0)
    assert (tmp_path / "ledger.1.jsonl").exists()


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 20))))
def test_ranges_hold_each_place_once(places: set[tuple[int, int]]) -> None:
    found = ranges(places)
    assert [(part.epoch, place) for part in found for place in range(part.first, part.stop)] == sorted(places)
    assert all(left.stop < right.first for left, right in pairwise(found) if left.epoch == right.epoch)
