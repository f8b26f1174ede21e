r"""GSM8K: is the final number of a response the right one?

`strict` reads the number after the last `####`, the form of the dataset's own answers. `flexible` reads, in this
order: that number, the last `\boxed{}`, the last `A: n` / `Answer: n` / `the answer is n`, the last number of all.
Both take `$42`, `1,000`, `42.0`, `42.`, `7/2`, and text after the number, and compare numbers, not strings.

>>> compute_score("6 * 7 = 42\n#### $42.00 in all", "42")
1.0
>>> compute_score(r"so we get \boxed{42}", "42"), compute_score(r"so we get \boxed{42}", "42", method="flexible")
(0.0, 1.0)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from paceline.rewards.score import Graded
from paceline.text import last_boxed

__all__ = ["compute_score", "compute_scores", "extract_number"]

Method = Literal["strict", "flexible"]

# A minus sign counts unless it follows a word or number, as in "10-3". A number may have thousands separators, also
# LaTeX's "1{,}000", or be a fraction.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-−])?(?:\\?[$€£]\s?(?P<sign2>[-−])?)?"
    r"(?P<whole>\d+(?:(?:,|\{,\})\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<below>\d+))?"
)
# What may stand between a marker such as "####" and its number: space, emphasis, the start of a LaTeX formula.
_LEAD = re.compile(r"(?:[\s*:_=`]|\\\(|\\\[|\$\$)*")
_ANSWER = re.compile(r"\bA(?:\*\*)?:|\b(?i:answer)(?:\*\*)?(?::|\s+(?i:is)\b)")
_LONGEST_NUMBER = 100


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    extra_info: object = None,
) -> float:
    """`score` for the right number, `format_score` for a wrong one, 0 where none was found.

    Args:
        solution_str: the response, without the prompt.
        ground_truth: the right number, such as "1,000", or a whole GSM8K answer that ends with `#### 1,000`.
        extra_info: unused; every scorer is given it.
    """
    expected = _expected(ground_truth)
    found = extract_number(solution_str, method)
    if found is None:
        return 0.0
    return score if found == expected else format_score


def compute_scores(
    solutions: Sequence[str], ground_truths: Sequence[object], extra_infos: Sequence[object], method: Method = "strict"
) -> list[Graded | Exception]:
    """Scores of many responses, each with `acc`, `extracted` and `pred`, the number that was read or ""."""
    results: list[Graded | Exception] = []
    for solution, ground_truth in zip(solutions, ground_truths, strict=True):
        try:
            expected = _expected(ground_truth)
        except ValueError as error:
            results.append(error)
            continue
        found = extract_number(solution, method)
        right = float(found == expected)
        pred = "" if found is None else str(found)
        results.append({"score": right, "acc": right, "extracted": found is not None, "pred": pred})
    return results


def extract_number(text: str, method: Method = "strict") -> Fraction | None:
    """The final number of a response, or None."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; choose strict or flexible.")
    marker = text.rfind("####")
    number = _number_at(text, marker + 4) if marker >= 0 else None
    if method == "strict" or number is not None:
        return number
    boxed = last_boxed(text)
    number = _last_number(boxed) if boxed else None
    if number is not None:
        return number
    for answer in reversed(list(_ANSWER.finditer(text))):
        number = _number_at(text, answer.end())
        if number is not None:
            return number
    return _last_number(text)


def _expected(ground_truth: object) -> Fraction:
    text = str(ground_truth)
    number = extract_number(text, "strict") if "####" in text else _number_at(text, 0)
    if number is None:
        raise ValueError(f"GSM8K's ground truth must be a number, not {text[:80]!r}.")
    return number


def _number_at(text: str, start: int) -> Fraction | None:
    lead = _LEAD.match(text, start)
    match = _NUMBER.match(text, lead.end() if lead else start)
    return _value(match) if match else None


def _last_number(text: str) -> Fraction | None:
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    whole = match["whole"].replace("{,}", "").replace(",", "")
    below = match["below"] or "1"
    if len(whole) > _LONGEST_NUMBER or len(below) > _LONGEST_NUMBER or int(below) == 0:
        return None
    value = Fraction(whole) / int(below)
    return -value if match["sign"] or match["sign2"] else value
