"""What a shell makes of text once its variables are filled in: sums of whole numbers, parts of a value, tests."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable


def _quotient(a: int, b: int) -> int:
    """Towards 0, as a shell divides: -7 / 2 is -3."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}
_LARGEST = 2**63


def computed(source: str) -> int:
    """The value of a sum of whole numbers with + - * / % and brackets; a ValueError for anything else."""
    try:
        return _value(ast.parse(source.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError("no sum") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            result = _OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("no sum")
    if abs(result) >= _LARGEST:
        raise ValueError("too large")
    return result


def cut(value: str, change: str) -> str:
    """`%`, `%%`, `#`, `##` cut an end or a beginning off; `/a/b` puts b for a; `,,` and `^^` change case."""
    if change in (",,", "^^"):
        return value.lower() if change == ",," else value.upper()
    if change.startswith("/"):
        everywhere = change.startswith("//")
        old, _, new = change.lstrip("/").partition("/")
        return value.replace(old, new) if everywhere else value.replace(old, new, 1)
    sign = re.match(r"%%|%|##|#", change)
    if sign is None:
        return value
    pattern = change[sign.end() :]
    places = range(len(value) + 1)
    if sign[0] in ("%", "%%"):
        found = [i for i in places if fnmatch.fnmatchcase(value[i:], pattern)]
        return value[: (max if sign[0] == "%" else min)(found)] if found else value
    found = [i for i in places if fnmatch.fnmatchcase(value[:i], pattern)]
    return value[(min if sign[0] == "#" else max)(found) :] if found else value


def any_of(words: list[str]) -> bool | None:
    """Tests with `&&`, `||` and `!` between them; None if one of them is of another kind."""
    answers = []
    for alternative in _parts(words, "||"):
        tests = [_test(part[1:], True) if part[:1] == ["!"] else _test(part) for part in _parts(alternative, "&&")]
        if None in tests:
            return None
        answers.append(all(tests))
    return any(answers)


def _parts(words: list[str], sign: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == sign:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _test(words: list[str], is_negated: bool = False) -> bool | None:
    """What a test says; None if it is of another kind, such as one about files."""
    if is_negated:
        answer = _test(words)
        return None if answer is None else not answer
    match words:
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as sign, right]:
            if not (left.lstrip("-").isdigit() and right.lstrip("-").isdigit()):
                return None
            compare = {
                "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
                "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
            }  # fmt: skip
            return bool(compare[sign](int(left), int(right)))
    return None
