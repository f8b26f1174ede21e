r"""HellaSwag: does a response choose the right one of four endings?

Reads, in this order: the last `\boxed{}`, the last `Answer: X` / `the answer is X`, a response or a last line that is
nothing but a choice, the last `(X)` / `option X`, and the one ending that is quoted. X is a letter, or an ending in
full, which takes `extra_info["endings"]`.

>>> compute_score("The roof is being taken off.\nAnswer: (D)", "D")
1.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.rewards.score import Graded
from paceline.text import last_boxed

__all__ = ["compute_score", "compute_scores", "extract_letter"]

LETTERS = "ABCD"

_ANSWER = re.compile(r"\banswer\b(?:\s+(?:is|would be|should be)\b)?[\s*_]*[:=]?", re.IGNORECASE)
# What may stand around a choice: space, brackets, quotes, emphasis, LaTeX, a word such as "option".
_LEAD = re.compile(
    r"(?:[\s*_`\"'“‘$(\[{:]|\\(?:text|textbf|mathrm|mathbf|boxed)\{|\\\(|(?:option|choice|ending|letter)\b)*",
    re.IGNORECASE,
)
_LETTER = re.compile(r"([A-D])(?![\w'’])")
_LETTER_ALONE = re.compile(r"([A-Da-d])(?=[\s*_`\"'”’$)\]}.:,;!]*\Z)")
_LETTER_BEFORE_ENDING = re.compile(r"([A-D])[)\]}*_]*[.):,\]](?!\w)")
_MENTION = re.compile(r"\(([A-D])\)|\b(?i:option|choice|ending)\s+\(?([A-D])\b")
# Bounds the work for a response that says "answer" all the time.
_CLAIMS = 20
_LONGEST_CLAIM = 2000


def compute_score(solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """1 if the response chooses the right ending, else 0.

    Args:
        solution_str: the response, without the prompt.
        ground_truth: the right ending: its letter, its number counted from 0, or its text.
        extra_info: `endings`, the four of them; without it, only letters are read.
    """
    endings = _endings(extra_info)
    return float(extract_letter(solution_str, endings) == _expected(ground_truth, endings))


def compute_scores(
    solutions: Sequence[str], ground_truths: Sequence[object], extra_infos: Sequence[object]
) -> list[Graded | Exception]:
    """Scores of many responses, each with `acc`, `extracted` and `pred`, the letter that was read or ""."""
    results: list[Graded | Exception] = []
    for solution, ground_truth, extra_info in zip(solutions, ground_truths, extra_infos, strict=True):
        try:
            endings = _endings(extra_info)
            expected = _expected(ground_truth, endings)
        except ValueError as error:
            results.append(error)
            continue
        found = extract_letter(solution, endings)
        right = float(found == expected)
        results.append({"score": right, "acc": right, "extracted": found is not None, "pred": found or ""})
    return results


def extract_letter(text: str, endings: Sequence[str] = ()) -> str | None:
    """The letter of the ending that a response chooses, or None."""
    plain = [_plain(ending) for ending in endings]
    boxed = last_boxed(text)
    letter = _read(boxed, plain) if boxed else None
    if letter is not None:
        return letter
    for answer in reversed(list(_ANSWER.finditer(text))[-_CLAIMS:]):
        letter = _read(text[answer.end() : answer.end() + _LONGEST_CLAIM], plain, claimed=True)
        if letter is not None:
            return letter
    lines = text.strip().splitlines()
    for candidate in (text, lines[-1] if lines else ""):
        letter = _read(candidate, plain)
        if letter is not None:
            return letter
    mentions = [match[1] or match[2] for match in _MENTION.finditer(text)]
    return mentions[-1] if mentions else _quoted(text, plain)


def _read(text: str, endings: Sequence[str], claimed: bool = False) -> str | None:
    """The choice that a text consists of; or, if it is `claimed` to be one, with which it starts.

    "A man walks in" is no choice of A.
    """
    first_line = text.strip().partition("\n")[0] if claimed else text
    whole = _plain(first_line)
    for letter, ending in zip(LETTERS, endings, strict=False):
        if whole == ending:
            return letter
    lead = _LEAD.match(text)
    start = lead.end() if lead else 0
    patterns = (_LETTER_ALONE, _LETTER_BEFORE_ENDING, _LETTER) if claimed else (_LETTER_ALONE, _LETTER_BEFORE_ENDING)
    for pattern in patterns:
        match = pattern.match(text, start)
        if match:
            return match[1].upper()
    return None


def _quoted(text: str, endings: Sequence[str]) -> str | None:
    """The letter of the one ending that a text quotes; one that is part of a longer quoted one is not meant."""
    whole = f" {_plain(text)} "
    found = [ending for ending in endings if ending and re.search(rf"(?<!\w){re.escape(ending)}(?!\w)", whole)]
    longest = [ending for ending in found if not any(ending != other and ending in other for other in found)]
    return LETTERS[list(endings).index(longest[0])] if len(longest) == 1 else None


def _plain(text: str) -> str:
    """In lower case, with single spaces, from the first letter or digit to the last."""
    inside = [position for position, character in enumerate(text) if character.isalnum()]
    return " ".join(text[inside[0] : inside[-1] + 1].split()).casefold() if inside else ""


def _endings(extra_info: object) -> list[str]:
    endings = extra_info.get("endings") if isinstance(extra_info, dict) else None
    if endings is None:
        return []
    if len(endings) != len(LETTERS):
        raise ValueError(f"HellaSwag has four endings, not {len(endings)}.")
    return [str(ending) for ending in endings]


def _expected(ground_truth: object, endings: Sequence[str]) -> str:
    text = str(ground_truth).strip()
    if text.upper() in LETTERS and len(text) == 1:
        return text.upper()
    if text in ("0", "1", "2", "3"):
        return LETTERS[int(text)]
    for letter, ending in zip(LETTERS, endings, strict=False):
        if _plain(ending) == _plain(text):
            return letter
    raise ValueError(f"HellaSwag's ground truth must be A, B, C, D or one of the endings, not {text[:80]!r}.")
