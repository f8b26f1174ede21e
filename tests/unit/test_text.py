"""Boxed answers, and names that were probably meant."""

from __future__ import annotations

import pytest

from paceline.text import did_you_mean, last_boxed, nearest, shorten, unknown_choice


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x : x > 1 \right.}", r"\left\{ x : x > 1 \right."),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed {6}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_is_found(text, answer):
    assert last_boxed(text) == answer


def test_letters_that_changed_places_and_small_slips_are_taken_for_the_name_that_was_meant():
    known = ["gae", "grpo", "remax", "tensorboard"]
    asked = ["gea", "grop", "remaxx", "tensorbord", "GAE", "", "wandb"]
    assert [nearest(name, known) for name in asked] == ["gae", "grpo", "remax", "tensorboard", "gae", None, None]


def test_nothing_is_suggested_where_nothing_is_known():
    assert nearest("gae", []) is None
    assert did_you_mean("gae", []) == ""
    assert unknown_choice("trainer.x", "a", []) == "trainer.x='a' is not known. Known: ."


def test_a_long_text_is_cut_in_a_message_and_a_short_one_is_not():
    assert shorten("x" * 80) == "x" * 80
    assert shorten("x" * 81) == "x" * 80 + "..."
