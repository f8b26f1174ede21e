"""Which text of a response is its answer."""

from __future__ import annotations

import pytest

from paceline.rewards.score import math


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("42", r"\boxed{41} \boxed{42}", 1.0),
        ("42", r"\boxed{42} \boxed{41}", 0.0),
        ("42", r"\boxed{42}, \boxed{42}", 1.0),
        ("42", r"\boxed{42} \boxed{}", 0.0),
        ("42", r"\boxed{42} \boxed{4", 0.0),
        ("42", r"\boxed{\boxed{42}}", 1.0),
        ("42", r"\boxed{41 \boxed{42}}", 0.0),
        ("42", r"\boxed{\boxed{41} \text{ or } \boxed{42}}", 0.0),
        ("42", r"\boxed{41 \fbox{42}}", 0.0),
        ("42", r"\boxed{\boxed{41}} \boxed{\fbox{42}}", 1.0),
        ("81, 256", r"either \boxed{81} or, with $x<0$, \boxed{256}", 1.0),
        ("81, 256", r"\boxed{256}, \boxed{81}", 1.0),
        ("81, 256", r"\boxed{81}, \boxed{255}, \boxed{256}", 0.0),
        ("81, 256", r"\boxed{3}; then \boxed{81} and \boxed{256}", 1.0),
        ("81, 256", r"\boxed{81} and \boxed{256}, so \boxed{81, 256}", 1.0),
        ("81, 256", r"\boxed{256}", 0.0),
        ("81, 256", r"\boxed{81}, \boxed{}, \boxed{256}", 0.0),
        ("(-2,18), (8,38)", r"$\boxed{(-2,18)}$ and $\boxed{(8,38)}$", 1.0),
        ("(1,2)", r"\boxed{1}, \boxed{2}", 0.0),
    ],
)
def test_the_last_boxes_are_the_answer(gold, response, score):
    assert math.compute_score(response, gold) == score


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("The answer is $42$.", "42", 1.0),
        ("6 * 7 is 42", "42", 1.0),
        (r"We get \(x+1\)", "1+x", 1.0),
        (r"\[ x = \frac{1}{2} \]", "0.5", 1.0),
        ("The final answer is $1,000$. I hope it is correct.", "1000", 1.0),
        (r"\boxed{42} and 7 more", "42", 1.0),
        (r"\boxed{41} and then 42", "42", 0.0),
        ("The answer is $41$ or $42$.", "42", 0.0),
        ("The answer is $41=42$.", "42", 0.0),
        ("first $42$, at last $43$", "42", 0.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_without_a_box_the_flexible_method_reads_the_last_formula(response, gold, score):
    assert math.compute_score(response, gold, method="flexible") == score
    if "boxed" not in response:
        assert math.compute_score(response, gold) == 0.0


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("6 * 7 = 42.\nAnswer: 42", "42", 1.0),
        ("**Answer:** $42$", "42", 1.0),
        ("Answer: \\boxed{42}", "42", 1.0),
        ("Answer: 41\n\nAnswer: 42", "42", 1.0),
        ("Answer: 42\n\nAnswer: 41", "42", 0.0),
        (r"\boxed{41}" + "\nAnswer: 42", "42", 1.0),
        ("Answer: 42\n" + r"no: \boxed{41}", "42", 0.0),
        (r"so \boxed{42}", "42", 1.0),
        ("Answer: 41 or 42", "42", 0.0),
        ("Answer: 033", "33", 1.0),
        ("Answer:\n42", "42", 1.0),
        ("Answer:", "42", 0.0),
        ("42", "42", 0.0),
    ],
)
def test_an_answer_line_counts_as_a_box_where_the_prompt_asks_for_one(response, gold, score):
    assert math.compute_score(response, gold, method="answer_line") == score


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match="strict, flexible or answer_line"):
        math.compute_score(r"\boxed{1}", "1", method="loose")
