"""What can be settled by text and plain numbers, without a process."""

from __future__ import annotations

import pytest

from paceline.rewards.score.math.answer_checks import settle
from paceline.rewards.score.math.compare_answers import compare


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{3}{4}", r"\tfrac{3}4"),
        (r"\sqrt{3}", r"\sqrt3"),
        ("10000", "10,000"),
        ("10000", "10{,}000"),
        ("10000", r"10\,000"),
        ("42", "42.0"),
        ("42", "42."),
        ("42", r"\$42"),
        ("0.5", ".5"),
        ("5", "x = 5"),
        ("90", r"90^\circ"),
        ("12", r"12\text{ cm}^2"),
        ("12", r"12 \mathrm{cm}"),
        ("12", "12 dollars"),
        (r"10\%", "10"),
        (r"\text{(A)}", "A"),
        ("A", r"\text{(A)}"),
        (r"\text{A, B}", "A,B"),
        (r"\text{Even}", "even"),
        (r"(1, 2)", r"\left(1,2\right)"),
    ],
)
def test_classic_normalisation_settles_it_without_any_process(gold, answer):
    assert settle(compare(gold, answer), {}) is True


@pytest.mark.parametrize(
    ("gold", "answer"), [("42", "43"), (r"\frac{1}{2}", "2"), ("10000", "1000"), ("0.5", "-0.5"), ("1", "1.0001")]
)
def test_plain_numbers_that_differ_are_wrong_without_any_process(gold, answer):
    assert settle(compare(gold, answer), {}) is False
