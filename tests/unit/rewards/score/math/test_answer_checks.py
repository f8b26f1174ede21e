"""The verdict on an answer follows from those on its pairs, where some of them timed out or failed, too."""

from __future__ import annotations

import pytest

from paceline.rewards.score.math.answer_checks import AllOf, Check, Matching, OneOf, Pair, Verdict, open_pairs, settle

A, B = Pair("a", "x"), Pair("b", "x")


@pytest.mark.parametrize(
    ("check", "verdicts", "verdict"),
    [
        (AllOf((A, True)), {A: True}, True),
        (AllOf((A, B)), {A: None, B: False}, False),  # wrong, whatever the one that timed out would have said
        (AllOf((A, B)), {A: None, B: True}, None),
        (OneOf((A, B)), {A: "broken", B: True}, True),
        (OneOf((A, B)), {A: "broken", B: False}, "broken"),
        (OneOf((A, False)), {A: False}, False),
        (AllOf(()), {}, True),
        (OneOf(()), {}, False),
    ],
)
def test_one_part_may_decide_it_alone(check: Check, verdicts: dict[Pair, Verdict], verdict: Verdict) -> None:
    assert settle(check, verdicts) is verdict or settle(check, verdicts) == verdict


def test_each_item_has_one_of_the_answer_to_itself() -> None:
    both_like_the_first = Matching(((True, False), (True, False)))
    assert settle(both_like_the_first, {}) is False
    assert settle(Matching(((True, True), (True, False))), {}) is True
    assert settle(Matching(((A, True), (True, False))), {A: None}) is True  # the first takes the second item
    assert settle(Matching(((A, False), (False, True))), {A: None}) is None


def test_only_pairs_are_left_to_mathematics() -> None:
    check = AllOf((A, OneOf((True, B)), Matching(((A, False), (None, "broken")))))
    assert list(open_pairs(check)) == [A, B, A]
