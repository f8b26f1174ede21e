r"""MATH: is the last `\boxed{}` of a response equal to the right answer?

First by the dataset's classic string normalisation and as plain numbers, which settles most responses in
microseconds; then by math-verify, as mathematics: order of terms, fractions, sets, intervals, percent, units,
matrices, text. The latter runs in processes that are killed at a deadline.

>>> compute_score(r"Hence \boxed{\dfrac12}.", r"\frac{1}{2}")
1.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from paceline.rewards.score.math_grader import shared_grader
from paceline.text import last_boxed

__all__ = ["DEADLINE_SECONDS", "compute_score", "compute_scores", "normalise"]

DEADLINE_SECONDS = 5.0
"""How long one pair of expressions may be compared."""

_PLAIN_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s+")
_UNIT = re.compile(r"(?<=[\w})\]])\\(?:text|mbox|mathrm|textrm)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_UNIT_WORDS = re.compile(r"(?<=\d)\s+[a-zA-Z]{3,}(?:\s[a-zA-Z]+)*\.?$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_LONGEST_NUMBER = 100


def compute_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    """1 if the last boxed answer of the response is right, else 0.

    Raises:
        TimeoutError: the comparison took longer than `DEADLINE_SECONDS`.
        ArithmeticError: the symbolic grader failed.
    """
    [result] = compute_scores([solution_str], [ground_truth], [extra_info])
    if isinstance(result, Exception):
        raise result
    if result.get("timeout"):
        raise TimeoutError(f"comparing the answer with {ground_truth!r} took longer than {DEADLINE_SECONDS:g} s.")
    return result["score"]


def compute_scores(
    solutions: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    deadline_seconds: float = DEADLINE_SECONDS,
) -> list[dict[str, Any] | Exception]:
    """Scores of many responses, each with `acc`, `extracted`, `timeout` and `pred`, the answer that was read in its
    normal form or ""; the hard ones on all cores.

    An exception in the list is a failure of the grader at that response.
    """
    results: list[dict[str, Any] | Exception] = []
    pairs: dict[int, tuple[str, str]] = {}
    for row, (solution, ground_truth) in enumerate(zip(solutions, ground_truths, strict=True)):
        boxed_gold = last_boxed(str(ground_truth))
        gold = str(ground_truth) if boxed_gold is None else boxed_gold
        answer = last_boxed(solution)
        right = False if answer is None else _decided(gold, answer)
        if answer and right is None:
            pairs[row] = (gold, answer)
        results.append(_result(bool(right), answer, extracted=bool(answer or right)))
    verdicts = shared_grader().grade(list(pairs.values()), deadline_seconds)
    for row, verdict in zip(pairs, verdicts, strict=True):
        if isinstance(verdict, str):
            results[row] = ArithmeticError(f"comparing {pairs[row][1]!r} with {pairs[row][0]!r}: {verdict}")
        else:
            results[row] = _result(bool(verdict), pairs[row][1], timeout=verdict is None)
    return results


def _result(right: bool, answer: str | None, extracted: bool = True, timeout: bool = False) -> dict[str, Any]:
    pred = normalise(answer) if answer else ""
    return {"score": float(right), "acc": float(right), "extracted": extracted, "timeout": timeout, "pred": pred}


def _decided(gold: str, answer: str) -> bool | None:
    """Equal or not as far as strings and plain numbers tell; None if it takes mathematics."""
    plain_gold, plain_answer = normalise(gold), normalise(answer)
    if plain_gold == plain_answer:
        return True
    if "\\text" in gold and plain_gold.casefold() == plain_answer.casefold():
        return True
    if "%" in gold + answer:
        return None
    gold_number, answer_number = _number(plain_gold), _number(plain_answer)
    if gold_number is None or answer_number is None:
        return None
    if gold_number == answer_number:
        return True
    # Whether 0.333333 is meant as 1/3 is math-verify's to say.
    rounded = "frac" in plain_gold + plain_answer and abs(gold_number - answer_number) < Fraction(1, 1000)
    return None if rounded else False


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    if _PLAIN_NUMBER.fullmatch(text):
        return Fraction(text.rstrip("."))
    fraction = _PLAIN_FRACTION.fullmatch(text)
    if fraction is None or int(fraction[3]) == 0:
        return None
    value = Fraction(int(fraction[2]), int(fraction[3]))
    return -value if fraction[1] else value


def normalise(answer: str) -> str:
    r"""The string by which answers are compared: one spelling for fractions, roots, spaces, units, signs of currency.

    >>> normalise(r"x = \dfrac34 \text{ cups}"), normalise(r"\$1{,}000.")
    ('\\frac{3}{4}', '1000')
    """
    text = answer.strip().rstrip(".").replace("{,}", ",").replace("\\$", "").replace("$", "")
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\%", "").replace("%", "")
    text = _UNIT_WORDS.sub("", text.strip())
    text = _SPACES.sub("", text)
    text = _UNIT.sub("", text)
    text = _TEXT.sub(r"\1", text)
    head, equals, tail = text.partition("=")
    if equals and len(head) <= 2 and "=" not in tail:
        text = tail
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    text = re.sub(r"\\sqrt([^{\[\\])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([^{\\])([^{\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{\\])\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([^{\\])", r"\1{\2}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return re.sub(r"^\(([a-zA-Z])\)$", r"\1", text)
