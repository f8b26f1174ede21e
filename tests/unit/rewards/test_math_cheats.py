r"""What passes for a right answer in MATH, and what must not.

The tables are of boxes; a hole in them is found by the policy. Of several boxes the last counts, and where the right
answer is a list, as many of the last as it has items.
"""

from __future__ import annotations

import pytest

from paceline.rewards.score import math
from paceline.rewards.score.math_grader import shared_grader

CHEATS = [
    # Equalities with a side that is wrong.
    ("42", "41=42"),
    ("42", "42=41"),
    ("42", "x=41=42"),
    ("42", "7x=42"),
    ("42", "41=x=42"),
    ("42", "x=41, x=42"),
    ("42", r"\pi = 42"),
    ("5", "7=5"),
    ("7=5", "5"),
    ("11a+c", "7 = 11a+c"),
    ("7 = 11a+c", "11a+c"),
    ("x + y + z = 0", "0 = 0"),
    ("x + y + z = 0", "0"),
    ("x + y + z = 0", "1 = 0"),
    ("4x-5y=-50", "-50"),
    ("x = 3", "y = 4 = 3"),
    ("x^2+1", "x^2+1 = x"),
    ("x^2+1", "x^2+1 = 0"),
    ("42", "= 42 = 43"),
    ("42", r"42 \approx 41"),
    ("42", r"41 \equiv 42"),
    (r"\sqrt{2}", r"\sqrt{2} = 41"),
    (r"\sqrt{2}", r"41 \approx \sqrt{2}"),
    # Numerals of another base, numbers with a subscript.
    ("42", "42_{16}"),
    ("42", "42_5"),
    ("42", r"42_{\text{eight}}"),
    ("42", r"(42)_{8}"),
    ("42", r"{42}_8"),
    ("66", "42_{16}"),
    ("42", "42_{16}+0"),
    ("42", "42_x"),
    ("2516_8", "2516_7"),
    ("24_{10}", "24_9"),
    # Several answers in one box.
    ("42", "41 or 42"),
    ("42", r"41 \text{ or } 42"),
    ("42", r"42 \text{ or } 41"),
    ("42", r"42\text{ or 41}"),
    ("42", "41, 42"),
    ("42", "42, 41"),
    ("42", "42; 41"),
    ("42", r"\{41, 42\}"),
    ("42", r"42 \text{ and } 41"),
    ("42", r"42\text{ (or maybe 41)}"),
    ("42", r"42 \text{ not } 41"),
    ("42", r"\text{not } 42"),
    ("42", r"41\text{ if wrong, }42"),
    ("42", r"41 \quad 42"),
    ("42", r"41 \mid 42"),
    ("42", r"41 / 42"),
    ("42", r"41 \to 42"),
    ("42", r"41 \cup 42"),
    ("42", r"[41, 42]"),
    ("42", r"42 \vee 41"),
    ("42", r"\begin{cases} 42 \\ 41 \end{cases}"),
    ("42", r"\begin{pmatrix} 42 & 41 \end{pmatrix}"),
    ("42", "the answer is 41 or 42"),
    ("42", r"x \in \{41, 42\}"),
    ("42", r"1, 2, \ldots, 42"),
    ("42", r"\ldots 42"),
    ("42", r"42 \ldots"),
    ("42", "42..."),
    (r"\text{(A)}", r"\text{(A) or (B)}"),
    (r"\text{(A)}", r"\text{(A)(B)(C)(D)(E)}"),
    ("A", "A, B"),
    ("A", "AB"),
    (r"\text{even}", r"\text{even or odd}"),
    ("81, 256", "81"),
    ("81, 256", "81, 256, 300"),
    ("81, 256", "81256"),
    ("81, 256", "81,256"),
    ("32349", "32, 349"),
    ("42", r"\pm 42"),
    (r"\pm 42", "42"),
    (r"3 \pm \sqrt{2}", r"3 + \sqrt{2}"),
    # Text around numbers, units, percent.
    ("3", "3 million"),
    ("3", r"3\text{ million}"),
    ("3", r"3 \text{ dozen}"),
    ("3", "3 times x"),
    ("3", r"3 \text{ times } x"),
    ("3", r"3\text{ hundred}"),
    ("3", r"3\text{ squared}"),
    ("3", r"3\text{ or so}"),
    ("3", r"3\text{ more than }x"),
    ("5", "5t"),
    ("5", "5m"),
    ("5x", "5"),
    ("5", "5!"),
    ("4", "4 2"),
    ("42", "4 2"),
    ("42", r"4\;2"),
    ("42", r"4 \text{} 2"),
    ("42", "4²"),
    ("42", "4^2"),
    (r"12\text{ cm}", r"12\text{ inches}"),
    (r"12\text{ cm}", r"12\text{ cm}^2"),
    (r"9\text{ a.m.}", r"9\text{ p.m.}"),
    ("0.5", r"0.5\%"),
    ("42", r"4200\% x"),
    ("42", r"42\%\%"),
    ("12:00", "1:00"),
    ("1:30", "2:60"),
    ("1:2", "2:1"),
    # Intervals, tuples, sets.
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "1,2,3"),
    ("[0,1)", "(0,1]"),
    (r"(-\infty, 3]", r"(-\infty, 3)"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("(100,200)", "100200"),
    # Numbers that are almost, or not at all, the right one.
    (r"\frac{1}{2598960}", "0.0"),
    (r"\frac{1}{2598960}", "0"),
    (r"10^{-9}", "0.0"),
    (r"\sqrt{2}", "1.4"),
    (r"\frac{1}{3}", "0.33"),
    ("3.14", r"\pi"),
    ("42", "4.2"),
    ("42", "-42"),
    ("42", r"\sqrt{42}"),
    ("42", "x"),
    ("42", r"\text{nan}"),
    ("42", r"\frac{42}{0}"),
    ("42", r"\infty"),
    ("42", "42,000"),
    ("10000", "10000,0"),
    (r"\text{east}", r"\text{seat}"),
    (r"\text{east}", "e a t s"),
    ("42", ""),
    ("42", "{}"),
    ("42", r"\text{}"),
    ("42", r"?"),
    ("42", r"\frac{"),
]

EQUAL = [
    # Fractions and decimals.
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", r"\tfrac{1}{2}"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    (r"\frac{1}{6}", r"0.1\overline{6}"),
    ("42", "42.0"),
    ("42", "42."),
    ("42", "+42"),
    ("42", "042"),
    ("42", "$42$"),
    ("42", r"\text{42}"),
    ("42", r"\mathbf{42}"),
    ("42", "４２"),
    ("-42", "−42"),
    ("10000", "10,000"),
    ("10000", "10{,}000"),
    ("10000", r"10,\!000"),
    ("10000", r"10\,000"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    ("3000000", r"3\text{ million}"),
    ("3000000", "3 million"),
    (r"10^{-6}", "0.000001"),
    ("1000000", "10^6"),
    # Units, currency, percent.
    ("42", r"\$42"),
    ("42", "42 dollars"),
    ("42", r"42\text{ dollars}"),
    ("18", r"18\text{ ways.}"),
    (r"10\;\text{edges}", "10"),
    (r"65 \text{ children tickets }", "65"),
    ("12", r"12\text{ cm}^2"),
    ("12", r"12 \mathrm{cm}"),
    (r"12\text{ cm}^2", r"12\text{ square centimeters}"),
    (r"34\text{ sq. units}", r"34\text{ square units}"),
    (r"8\sqrt{3} \text { square inches}", r"8\sqrt{3}"),
    (r"125\textnormal{ miles}", "125 miles"),
    (r"\approx 8.24 \text{ mph}", "8.24"),
    ("90", r"90^\circ"),
    (r"108\text{ degrees}", r"108^{\circ}"),
    (r"10\%", "10"),
    (r"10\%", "0.1"),
    ("0.5", r"50\%"),
    ("75", r"75\%"),
    (r"32 \%", r"32\text{ percent}"),
    (r"237.5\%", "2.375"),
    # Equalities and names.
    ("5", "x = 5"),
    ("5", "5 = x"),
    ("5", "x_1 = 5"),
    ("5", "f(2) = 5"),
    ("5", r"\angle ABC = 5^\circ"),
    ("5", "a + b = 5"),
    ("5", "AB = 5"),
    ("5", r"\text{Area} = 5"),
    ("42", "6 \\cdot 7 = 42"),
    ("42", "x = 84/2 = 42"),
    ("42", r"x \approx 42"),
    (r"\sqrt{2}", r"x = \sqrt{2} \approx 1.414214"),
    ("x = 5", "5"),
    ("y=2x+1", "2x+1"),
    ("y=2x+1", "y = 1 + 2x"),
    ("x + y - z + 1 = 0", "2x + 2y - 2z + 2 = 0"),
    ("x^2 + y^2 = 13", "13 = x^2 + y^2"),
    ("0.56 = 56\\%", "0.56"),
    ("AB=9, CD=4", "CD = 4, AB = 9"),
    # Expressions.
    ("1+x", "x+1"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"5\sqrt{2}", r"\sqrt{50}"),
    (r"\sqrt{3}", r"\sqrt3"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"12\pi", r"12π"),
    ("2abc", "2 abc"),
    ("8+4i", "4i + 8"),
    (r"\sqrt{2}", "1.414214"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\3 & \frac{8}{2}\end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 1 \\ \frac{4}{2} \end{bmatrix}"),
    ("x^2+1", "f(x) = x^2+1"),
    (r"2\sqrt{3}", "2√3"),
    # Lists, sets, tuples, intervals.
    ("1,2", "2, 1"),
    ("81, 256", "256, 81"),
    ("1,2", r"\{1,2\}"),
    ("1,2", r"1 \text{ and } 2"),
    (r"-12 \text{ or } -30", "-30, -12"),
    (r"2, 3, \text{ and } 4", "2,3,4"),
    ("1,2", "x = 1, x = 2"),
    ("1, 2", r"x = 1 \text{ or } x = 2"),
    (r"\{1,2\}", r"\left\{2,1\right\}"),
    (r"\pm 2", "2,-2"),
    ("2,-2", r"\pm 2"),
    (r"3 \pm 2 \sqrt{2}", r"3 - 2\sqrt{2}, 3 + 2\sqrt{2}"),
    ("(1, 2)", r"\left(1,2\right)"),
    ("(1, 2)", "1, 2"),
    ("(1, 2)", r"(1.0, \frac{4}{2})"),
    ("(1,2),(3,4)", r"(3,4) \text{ and } (1,2)"),
    (r"(-\infty,3]", r"\left(-\infty, 3\right]"),
    (r"(-\infty,3]", r"x \le 3"),
    (r"x \le 3", r"(-\infty,3]"),
    ("[1,2]", r"x \in [1,2]"),
    (r"(-\infty,-1) \cup (1,\infty)", r"(1,\infty) \cup (-\infty,-1)"),
    ("(0,9)\\cup (9,36)", "(0, 9) \\cup (9, 36)"),
    # Words, letters, bases, ratios, times.
    (r"\text{(A)}", "A"),
    ("A", r"\text{(A)}"),
    (r"\text{Even}", "even"),
    (r"\text{east}", r"\textbf{East}"),
    (r"\text{two lines}", "two lines"),
    (r"\text{A, B}", "B,A"),
    (r"\mbox{Saturday}", r"\text{Saturday}."),
    ("2516_8", "2516_{8}"),
    ("2516_8", "2516"),
    ("24_{10}", "24"),
    ("42", "42_{10}"),
    (r"\text{A5}_{11}", "A5_{11}"),
    ("152A_{11}", "152a_{11}"),
    ("1:2", r"\frac{1}{2}"),
    ("1 : 2", "1:2"),
    (r"8\!:\!34 \text{ p.m.}", r"8:34\text{ PM}"),
]


@pytest.fixture(scope="module", autouse=True)
def _end_processes():
    yield
    shared_grader().close()


def scores(pairs: list[tuple[str, str]]) -> list[tuple[str, str, object]]:
    golds, answers = zip(*pairs, strict=True)
    results = math.compute_scores([rf"So \boxed{{{answer}}}." for answer in answers], golds, [None] * len(pairs))
    return [
        (*pair, result if isinstance(result, Exception) or result["timeout"] else result["score"])
        for pair, result in zip(pairs, results, strict=True)
    ]


def test_no_cheat_scores():
    assert [row for row in scores(CHEATS) if row[2] != 0.0] == []


def test_another_form_of_the_right_answer_scores():
    assert len(EQUAL) >= 60
    assert [row for row in scores(EQUAL) if row[2] != 1.0] == []


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


HUGE = [
    "9" * 100_000,
    "1" + "0" * 5000,
    "(" * 3000 + "42" + ")" * 3000,
    "{" * 3000 + "42" + "}" * 3000,
    r"\frac{" * 1000 + "42" + "}{1}" * 1000,
    r"\sqrt{" * 1000 + "42" + "}" * 1000,
    "42" + r"\%" * 3000,
    "42" + "=42" * 2000 + "=41",
    ",".join(["42"] * 3000),
    "x" * 9000,
    r"\text{" * 2000 + "42" + "}" * 2000,
    "42" + " " * 9000 + "x",
    "42_" * 3000,
    "1:" * 3000,
    r"\pm" * 3000 + "42",
    "-" * 4999 + "42",
    "(1," * 2000 + "2" + ")" * 2000,
    "a = " * 2000 + "42",
    r"\begin{matrix}" * 500,
    "\ud800",
    "\x00",
]


def test_a_huge_or_odd_answer_costs_little_and_harms_no_other():
    hard = ["9^{9^{9^9}}", r"\sum_{k=1}^{10^9} k^k", r"10^{10^{10}} \bmod 7", "1000000000!"]
    answers = [*HUGE, *hard, "x+1"]
    results = math.compute_scores([rf"\boxed{{{answer}}}" for answer in answers], ["1+x"] * len(answers), answers, 2.0)
    assert [result for result in results if isinstance(result, Exception)] == []
    assert [result["score"] for result in results] == [0.0] * (len(answers) - 1) + [1.0]


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
