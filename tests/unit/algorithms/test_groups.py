from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages_by_group import compute_grpo_outcome_advantage
from paceline.algorithms.groups import Groups, groups_with_signal
from tests.unit.algorithms.algorithm_cases import QUICK

ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from("abc")), max_size=9)


def test_a_group_has_signal_where_its_scores_differ() -> None:
    # a: 1 and 0 differ. b: 1 and 1 do not. c: one response has nothing to differ from.
    scores = np.array([1.0, 1.0, 0.5, 0.0, 1.0])
    mask = groups_with_signal(scores, np.array(["a", "b", "c", "a", "b"], dtype=object))
    assert mask.dtype == bool
    assert mask.tolist() == [True, False, False, True, False]
    assert groups_with_signal(torch.from_numpy(scores), ["a", "b", "c", "a", "b"]).tolist() == mask.tolist()


@QUICK
@given(rows=ROWS)
def test_it_equals_the_slow_version(rows) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    expected = [len({score for score, other in rows if other == group}) > 1 for group in groups]
    assert groups_with_signal(np.array(scores), groups).tolist() == expected


@QUICK
@given(rows=ROWS)
def test_groups_without_signal_are_those_that_grpo_gives_no_advantage(rows) -> None:
    scores = torch.tensor([[score] for score, _ in rows], dtype=torch.float64).view(len(rows), 1)
    groups = [group for _, group in rows]
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones(len(rows), 1), groups)
    signal = torch.from_numpy(groups_with_signal(scores[:, 0], groups))
    assert not (advantages[~signal].abs() > 1e-9).any()
    # In a group with signal some score may be the mean itself, but not all.
    for group in {group for group, has_signal in zip(groups, signal.tolist(), strict=True) if has_signal}:
        assert advantages[[other == group for other in groups]].abs().max() > 0.1


def test_equal_scores_have_no_signal_whatever_their_mean_rounds_to() -> None:
    assert not groups_with_signal(torch.full((7,), 0.1), ["a"] * 7).any()


def test_scores_that_are_not_finite_and_ids_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[1, 3\]"):
        groups_with_signal(np.array([0.0, np.nan, 1.0, np.inf]), ["a"] * 4)
    with pytest.raises(ValueError, match="2 group ids for 3 responses"):
        groups_with_signal(np.zeros(3), ["a", "b"])


@QUICK
@given(rows=ROWS)
def test_the_largest_and_the_deviation_of_a_group_equal_the_slow_version(rows) -> None:
    scores = torch.tensor([score for score, _ in rows], dtype=torch.float64)
    groups = Groups(torch.ones(len(rows), 1), [group for _, group in rows])
    of_group = {name: [score for score, other in rows if other == name] for name in "abc"}
    assert groups.max(scores).tolist() == [max(of_group[name]) for _, name in rows]
    deviations = {name: statistics.stdev(found) if len(found) > 1 else 0.0 for name, found in of_group.items()}
    assert groups.std(scores).tolist() == pytest.approx([deviations[name] for _, name in rows], abs=1e-12)
    signal = groups_with_signal(scores, [group for _, group in rows])
    assert groups.differ(scores).tolist() == signal.tolist()


def test_a_row_without_a_token_has_no_part_in_its_group() -> None:
    mask = torch.tensor([[1, 1], [0, 0], [0, 1], [0, 0]])
    groups = Groups(mask, ["a", "a", "a", "b"])
    x = torch.tensor([1.0, 9.0, 3.0, 5.0])
    assert groups.max(x).tolist() == [3.0, 3.0, 3.0, -torch.inf]
    assert groups.sum(mask).tolist() == [[1, 2], [1, 2], [1, 2], [0, 0]]
    assert groups.differ(x).tolist() == [True, False, True, False]
