r"""MATH: is the final answer of a response equal to the right one?

`strict` reads the last `\boxed{}`. `answer_line` also reads the last line of the form `Answer: 42`; of line and box,
the one that comes later. `flexible` reads the box, or else the last formula or number of the text, by math-verify's
rules. Where the right answer is a list of n, and the last box holds one item, the last n boxes together are the answer.

The answer is taken apart as `compare_answers` says; what strings and numbers do not settle goes to math-verify
(`symbolic`), in processes that are killed at a deadline.

>>> compute_score(r"Hence \boxed{\dfrac12}.", r"\frac{1}{2}")
1.0
"""

from __future__ import annotations

import atexit
import pickle
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.rewards.killable import FunctionPool
from paceline.rewards.score import Graded
from paceline.rewards.score.math.answer_checks import Check, Verdict, open_pairs, settle
from paceline.rewards.score.math.compare_answers import compare, normal_form, num_items
from paceline.text import all_boxed, last_boxed

__all__ = ["DEADLINE_SECONDS", "MathGrader", "Method", "compute_score", "compute_scores", "shared_grader"]

Method = Literal["strict", "flexible", "answer_line"]

DEADLINE_SECONDS = 5.0
"""How long one pair of expressions may be compared."""
LONGEST_ANSWER = 2_000
"""Characters of an answer; what is longer is wrong."""
MEMORY_BYTES = 2 << 30
"""For one comparison; `9^{9^{9^9}}` takes all there is."""

_ANSWER_LINE = re.compile(r"\banswer[ \t]{0,3}\*{0,3}[ \t]{0,3}:\s*\**[ \t]*([^\n]*)", re.IGNORECASE)


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,
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
    ground_truths: Sequence[object],
    extra_infos: Sequence[object],
    deadline_seconds: float = DEADLINE_SECONDS,
    method: Method = "strict",
) -> list[Graded | Exception]:
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
    answered = zip(pairs, shared_grader().grade(pairs, deadline_seconds), strict=True)
    verdicts = {pair: verdict for pair, verdict in answered if not isinstance(verdict, list)}
    rows = zip(golds, answers, checks, strict=True)
    return [_result(gold, answer, settle(check, verdicts)) for gold, answer, check in rows]


def _gold(ground_truth: object) -> str:
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


def _result(gold: str, answer: str | None, verdict: Verdict) -> Graded | Exception:
    if isinstance(verdict, str):
        return ArithmeticError(f"comparing {answer!r} with {gold!r}: {verdict}")
    right = float(verdict is True)
    pred = normal_form(answer) if answer and len(answer) <= LONGEST_ANSWER else ""
    return {"score": right, "acc": right, "extracted": bool(answer), "timeout": verdict is None, "pred": pred}


Question = tuple[str, str] | str
"""Are gold and answer equal? Or: which is the last formula of a text?"""


class MathGrader(FunctionPool):
    """Answers questions of `symbolic` in processes of their own."""

    def __init__(self) -> None:
        source = pickle.dumps(("maker", Path(__file__).with_name("symbolic.py"), "make_grader"))
        # Else sympy's order of terms, and so its speed, would differ from run to run.
        super().__init__(source, MEMORY_BYTES, variables={"PYTHONHASHSEED": "0"})

    def grade(self, questions: Sequence[Question], deadline_seconds: float) -> list[Verdict | list[str]]:
        """Each answer within the deadline: right or wrong, or formulas; None if it took too long or too much memory; a
        message for a failure. Equal questions are asked once."""
        unique = list(dict.fromkeys(questions))
        answers = dict(zip(unique, self._ask(unique, deadline_seconds) if unique else [], strict=True))
        return [answers[question] for question in questions]

    def _ask(self, questions: Sequence[Question], deadline_seconds: float) -> list[Verdict | list[str]]:
        answers = self.call_all([((question,), {}) for question in questions], deadline_seconds)
        return [_answer(answer) for answer in answers]


def _answer(answer: object) -> Verdict | list[str]:
    if answer is None or isinstance(answer, TimeoutError):
        return None
    return answer if isinstance(answer, bool | str | list) else str(answer)


@cache
def shared_grader() -> MathGrader:
    """The grader of this process."""
    grader = MathGrader()
    atexit.register(grader.close)
    return grader
