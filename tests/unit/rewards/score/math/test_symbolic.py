"""Mathematical equality, by sympy."""

from __future__ import annotations

from paceline.rewards.score import math


def boxed(answer: str) -> str:
    return rf"Therefore the answer is $\boxed{{{answer}}}$."


EQUAL = [
    ("1+x", "x+1"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"5\sqrt{2}", r"\sqrt{50}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"0.1\overline{6}", r"\frac{1}{6}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2, 1"),
    (r"\pm 2", "2,-2"),
    (r"(-\infty,3]", r"\left(-\infty, 3\right]"),
    (r"x \le 3", r"(-\infty,3]"),
    (r"x \in [1,2]", "[1,2]"),
    (r"10\%", "0.1"),
    ("0.5", r"50\%"),
    ("12\\pi", r"12\pi\text{ square inches}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\3 & \frac{8}{2}\end{bmatrix}"),
    (r"\text{east}", "east"),
    ("2516_8", "2516_{8}"),
    ("y=2x+1", "2x+1"),
]


DIFFERENT = [
    ("1+x", "x-1"),
    ("x", "y"),
    ("[0,1)", "(0,1]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"),
    ("2", "1,2"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("10", r"0.1\%"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    (r"0.\overline{3}", "0"),
    ("2516_8", "2516_7"),
    (r"\text{(A)}", "B"),
    (r"\text{Tuesday}", r"\text{Monday}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("5", "the answer is 5 or 6"),
    ("5", r"\frac{"),
    ("5", ""),
]


def test_mathematical_equality_is_found_and_difference_too():
    pairs = [(pair, 1.0) for pair in EQUAL] + [(pair, 0.0) for pair in DIFFERENT]
    golds, answers = zip(*(pair for pair, _ in pairs), strict=True)
    results = math.compute_scores([boxed(answer) for answer in answers], golds, [None] * len(pairs))
    mistakes = [
        (pair, result) for (pair, expected), result in zip(pairs, results, strict=True)
        if isinstance(result, Exception) or result["score"] != expected or result["timeout"]
    ]  # fmt: skip
    assert mistakes == []
