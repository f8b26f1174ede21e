"""Reading of text that several layers need."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

SIMILAR = 0.75
"""From here on one name is taken for another one that was meant."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}`, `\fbox{...}` or `\boxed 5` holds; None if there is none or it is cut off.

    >>> last_boxed(r"\boxed{1} and then \boxed{\left\{\frac{1}{2}, 3\right\}}.")
    '\\left\\{\\frac{1}{2}, 3\\right\\}'
    """
    boxes = all_boxed(text)
    return boxes[-1] if boxes else None


def all_boxed(text: str) -> list[str | None]:
    r"""What each box holds, in order; None for one that is cut off. A box inside a box is part of the outer one, and is
    opened if it is all that the outer one holds.

    >>> all_boxed(r"\boxed{1}, \boxed{2 + \boxed{3}}, \boxed{\boxed{4}}")
    ['1', '2 + \\boxed{3}', '4']
    """
    boxes: list[str | None] = []
    position = 0
    while match := _BOX.search(text, position):
        start = match.end()
        if text[start : start + 1] == "{":
            end = _closing_brace(text, start)
            boxes.append(None if end is None else _opened(text[start + 1 : end].strip()))
            position = len(text) if end is None else end + 1
        else:
            word = re.compile(r"[^\s$]+").match(text, start)
            boxes.append(word[0].rstrip(".,;") if word else None)
            position = word.end() if word else start
    return boxes


def _opened(content: str) -> str:
    while match := _BOX.match(content):
        if content[match.end() : match.end() + 1] != "{" or _closing_brace(content, match.end()) != len(content) - 1:
            break
        content = content[match.end() + 1 : -1].strip()
    return content


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace at `start` is closed; an escaped brace is no brace."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return None


def shorten(text: str, length: int = 80) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= length else f"{text[:length]}..."


def similarity(asked: str, known: str) -> float:
    """How alike two names are, from 0 to 1. Two letters that changed places are one slip, also in a short name.

    >>> similarity("gea", "gae") > SIMILAR > similarity("rollout_correction", "horizon")
    True
    """
    asked, known = asked.lower(), known.lower()
    differences = [place for place, (a, b) in enumerate(zip(asked, known, strict=False)) if a != b]
    if len(asked) == len(known) > 2 and len(differences) == 2 and sorted(asked) == sorted(known):
        return max(0.9, SequenceMatcher(None, asked, known).ratio())
    return SequenceMatcher(None, asked, known).ratio()


def nearest(asked: str, known: Iterable[str], at_least: float = SIMILAR) -> str | None:
    """The known name that was probably meant; None if none is like it.

    >>> nearest("atuo", ["auto", "disable"]), nearest("never", ["auto", "disable"])
    ('auto', None)
    """
    rated = [(similarity(asked, name), name) for name in known]
    best, name = max(rated, key=lambda pair: pair[0], default=(0.0, ""))
    return name if best >= at_least else None


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """A sentence for the end of a message, with the space before it; empty if no known name is like the asked one.

    >>> did_you_mean("atuo", ["auto", "disable"])
    ' Did you mean auto?'
    """
    name = nearest(asked, known)
    return f" Did you mean {name}?" if name is not None else ""


def unknown_choice(key: str, asked: str, known: Iterable[str]) -> str:
    """What to say of a value that is none of the known ones.

    >>> unknown_choice("trainer.resume_mode", "atuo", ["auto", "disable"])
    "trainer.resume_mode='atuo' is not known; did you mean auto? Known: auto, disable."
    """
    names = list(known)
    return f"{key}={asked!r} is not known{meant(nearest(asked, names))} Known: {', '.join(names)}."


def meant(close: str | None) -> str:
    """How a sentence about a name that is not known goes on, with the name that is like it if there is one.

    >>> meant("auto"), meant(None)
    ('; did you mean auto?', '.')
    """
    return f"; did you mean {close}?" if close else "."
