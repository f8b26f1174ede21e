"""Reading of text that several layers need."""

from __future__ import annotations

import re

__all__ = ["last_boxed"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}`, `\fbox{...}` or `\boxed 5` holds; None if there is none or it is cut off.

    >>> last_boxed(r"\boxed{1} and then \boxed{\left\{\frac{1}{2}, 3\right\}}.")
    '\\left\\{\\frac{1}{2}, 3\\right\\}'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        word = re.match(r"[^\s$]+", text[start:])
        return word[0].rstrip(".,;") if word else None
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":  # an escaped brace is no brace
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : position].strip()
        position += 1
    return None
