r"""MATH: is the final answer of a response equal to the right one?

`strict` reads the last `\boxed{}`. `answer_line` also reads the last line of the form `Answer: 42`; of line and box,
the one that comes later. `flexible` reads the box, or else the last formula or number of the text, by math-verify's
rules. Where the right answer is a list of n, and the last box holds one item, the last n boxes together are the answer.

The answer is taken apart as `math_compare` says; what strings and numbers do not settle goes to math-verify, in
processes that are killed at a deadline.

>>> compute_score(r"Hence \boxed{\dfrac12}.", r"\frac{1}{2}")
1.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from paceline.rewards.score.math_compare import Check, Verdict, compare, normal_form, num_items, open_pairs, settle
from paceline.rewards.score.math_grader import shared_grader
from paceline.text import all_boxed, last_boxed

__all__ = ["DEADLINE_SECONDS", "Method", "compute_score", "compute_scores"]

Method = Literal["strict", "flexible", "answer_line"]

DEADLINE_SECONDS = 5.0
"""How long one pair of expressions may be compared."""
LONGEST_ANSWER = 2_000
"""Characters of an answer; what is longer is wrong."""

_ANSWER_LINE = re.compile(r"\banswer[ \t]{0,3}\*{0,3}[ \t]{0,3}:\s*\**[ \t]*([^\n]*)", re.IGNORECASE)


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    method: Method = "strict",
) -> float:
    """1 if the final answer of the response is right, else 0.

    Raises:
        TimeoutError: the comparison took longer than `DEADLINE_SECONDS`.
        ArithmeticError: the symbolic grader failed.
    """
    [result] = compute_scores([solution_str], [ground_truth], [extra_info], method=method)
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
    method: Method = "strict",
) -> list[dict[str, Any] | Exception]:
    """Scores of many responses, each with `acc`, `extracted`, `timeout` and `pred`, the answer that was read in its
    normal form or ""; the hard ones on all cores.

    An exception in the list is a failure of the grader at that response.
    """
    golds = [_gold(truth) for truth in ground_truths]
    answers = [_read(method, *row) for row in zip(solutions, golds, strict=True)]
    checks = [_check(*row) for row in zip(golds, answers, strict=True)]
    if method == "flexible":
        unread = [row for row, solution in enumerate(solutions) if solution.strip() and not all_boxed(solution)]
        found = shared_grader().grade([solutions[row] for row in unread], deadline_seconds)
        for row, formulas in zip(unread, found, strict=True):
            if isinstance(formulas, list):
                answers[row] = formulas[-1] if formulas else None
                checks[row] = _check(golds[row], answers[row])
            else:  # it took too long, or failed
                checks[row] = formulas
    pairs = list(dict.fromkeys(pair for check in checks for pair in open_pairs(check)))
    verdicts = dict(zip(pairs, shared_grader().grade(pairs, deadline_seconds), strict=True))
    rows = zip(golds, answers, checks, strict=True)
    return [_result(gold, answer, settle(check, verdicts)) for gold, answer, check in rows]


def _gold(ground_truth: Any) -> str:
    """The right answer; a ground truth may be a whole solution."""
    text = str(ground_truth)
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def _read(method: Method, solution: str, gold: str) -> str | None:
    """The final answer of a response; None if there is none."""
    if method not in ("strict", "flexible", "answer_line"):
        raise ValueError(f"method={method!r}; choose strict, flexible or answer_line.")
    boxed = _boxed_answer(solution, gold)
    return _later_line(solution, boxed) if method == "answer_line" else boxed


def _boxed_answer(solution: str, gold: str) -> str | None:
    boxes = all_boxed(solution)
    if not boxes or boxes[-1] is None:
        return None
    wanted = num_items(gold)
    final = boxes[-wanted:]
    if wanted > 1 and num_items(boxes[-1]) == 1 and len(final) == wanted and all(final):
        return ", ".join(box for box in final if box)
    return boxes[-1]


def _later_line(solution: str, boxed: str | None) -> str | None:
    lines = list(_ANSWER_LINE.finditer(solution))
    if not lines or "\\boxed" in solution[lines[-1].start() :]:
        return boxed
    return lines[-1][1].strip(" \t*") or None


def _check(gold: str, answer: str | None) -> Check:
    if not answer or len(answer) > LONGEST_ANSWER or "\\boxed" in answer or "\\fbox" in answer:
        return False
    return compare(gold, answer)


def _result(gold: str, answer: str | None, verdict: Verdict) -> dict[str, Any] | Exception:
    if isinstance(verdict, str):
        return ArithmeticError(f"comparing {answer!r} with {gold!r}: {verdict}")
    right = float(verdict is True)
    pred = normal_form(answer) if answer and len(answer) <= LONGEST_ANSWER else ""
    return {"score": right, "acc": right, "extracted": bool(answer), "timeout": verdict is None, "pred": pred}
