"""The tests in a ground truth of code: read, and refused if they can't tell right programs from wrong ones.

Nothing runs here; test code is only parsed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from paceline.errors import DataError
from paceline.rewards.score.code.name_owners import name_owners

__all__ = ["CodeTests", "Kind", "read_tests"]

Kind = Literal["stdin", "calls", "assert"]

PARSING = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True)
class CodeTests:
    """What a program is tried on, and what is expected."""

    kind: Kind
    cases: Sequence[object]
    """Texts to read; questions as `program_side` takes them; pieces of test code."""
    expected: Sequence[object] = field(default_factory=list)
    """As many as cases; nothing for assertions, which hold it themselves."""
    names: list[str] = field(default_factory=list)
    """Names in test code that are the program's."""
    library: dict[str, str] = field(default_factory=dict)
    """Names in test code that are the library's, and their modules."""


def read_tests(ground_truth: object) -> CodeTests:
    """The tests of a ground truth; a `DataError` says why there are none that could be used."""
    try:
        return _read(_plain(ground_truth))
    except RecursionError:
        raise DataError("The ground truth of code is nested too deep to be read.") from None


def _read(value: object) -> CodeTests:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = {"asserts": value}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {"inputs": [item.get("input") for item in value], "outputs": [item.get("output") for item in value]}
    elif isinstance(value, list):
        value = {"asserts": value}
    if not isinstance(value, dict):
        raise DataError(f"The ground truth of code must be a dict with tests, or its JSON, not {str(value)[:80]!r}.")
    fn_name = value.get("fn_name")
    if value.get("asserts"):
        return _read_asserts(json.dumps(value["asserts"], default=str), json.dumps(fn_name, default=str))
    inputs = value.get("inputs", value.get("input"))
    outputs = value.get("outputs", value.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"The ground truth of code has {_count(inputs)} inputs and {_count(outputs)} outputs (keys: "
            f"{', '.join(map(str, value)) or 'none'}). Give `inputs` and `outputs`, lists of one length, or `asserts`."
        )
    if not fn_name:
        texts = [[_text(item, f"{name}[{n}]") for n, item in enumerate(items)]
                 for name, items in (("inputs", inputs), ("outputs", outputs))]  # fmt: skip
        return CodeTests("stdin", texts[0], texts[1])
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise DataError(f"`inputs` of fn_name={fn_name!r} must be lists of arguments, such as [[1, 2], [3, 4]].")
    try:
        json.dumps([inputs, outputs])
    except (TypeError, ValueError) as error:
        raise DataError(f"`inputs` and `outputs` of fn_name={fn_name!r} must be what JSON can hold: {error}.") from None
    return CodeTests("calls", [[None, str(fn_name), _encoded(arguments), {}] for arguments in inputs], outputs)


def _plain(value: object) -> object:
    """Lists for numpy arrays, which is how parquet columns arrive."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _text(value: object, where: str) -> str:
    if isinstance(value, list):
        return "\n".join(_text(item, where) for item in value)
    if value is None or not isinstance(value, str | int | float):
        raise DataError(
            f"The ground truth of code has {type(value).__name__} as {where}, which is not text. Give the text that is "
            "read or printed, or `fn_name` if these are arguments and results of a function."
        )
    return str(value)


def _encoded(value: object) -> object:
    """JSON data in the form of `plain_data.encode`."""
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        return {"type": "dict", "value": [[str(key), _encoded(item)] for key, item in value.items()]}
    if isinstance(value, int) and abs(value) >= 1 << 62:
        return {"type": "int", "value": hex(value)}
    return value


def _count(values: object) -> int | str:
    return len(values) if isinstance(values, list) else "no"


# -- assertions -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _read_asserts(asserts_json: str, fn_name_json: str) -> CodeTests:
    """A string is cut at its assertions, each with the lines before it; a list is taken as it is."""
    asserts, fn_name = json.loads(asserts_json), json.loads(fn_name_json)
    if isinstance(asserts, str):
        pieces = _cut(asserts)
    else:
        pieces = [str(item) for item in asserts] if isinstance(asserts, list) else []
    pieces = [piece for piece in pieces if piece.strip()]
    if not pieces:
        raise DataError("The ground truth of code has `asserts`, but none in it. Give a string or a list of strings.")
    cases = _with_assertions(pieces)
    fn_names = [str(name) for name in (fn_name if isinstance(fn_name, list) else [fn_name]) if name]
    code = "\n".join(cases)
    names, library = name_owners(code, _parsed(code), fn_names)
    return CodeTests("assert", cases, names=names, library=library)


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except PARSING as error:
        raise DataError(f"An assertion of the ground truth is no Python: {error}: {code[:200]!r}.") from None


def _cut(code: str) -> list[str]:
    body = _parsed(code).body
    lines = code.splitlines(keepends=True)
    ends = sorted({node.end_lineno or 0 for node in body if isinstance(node, ast.Assert)})
    if not ends or ends[-1] < (body[-1].end_lineno or 0):
        ends = [*ends[:-1], len(lines)] if ends else [len(lines)]
    return ["".join(lines[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _with_assertions(pieces: list[str]) -> list[str]:
    """Pieces that can fail, each with those before it that can't."""
    functions: dict[str, ast.AST] = {}
    cases, waiting = [], ""
    for piece in pieces:
        tree = _parsed(piece)
        functions.update({node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)})
        waiting += piece if piece.endswith("\n") else f"{piece}\n"
        if _can_fail(tree, functions):
            cases.append(waiting)
            waiting = ""
    if not cases:
        raise DataError(
            f"The ground truth of code has no assertion that can fail, so every program would pass: "
            f"{''.join(pieces)[:200]!r}. An assertion counts if it runs (a function with assertions has to be called) "
            "and is no constant."
        )
    return [*cases[:-1], cases[-1] + waiting]


def _can_fail(tree: ast.AST, functions: dict[str, ast.AST]) -> bool:
    """Whether an assertion that is no constant runs, here or in a function that is used here."""
    reached: set[str] = set()
    waiting = [tree]
    while waiting:
        for node in _running(waiting.pop()):
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and not _is_constant(node.test)):
                return True
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name in functions and name not in reached:
                reached.add(name)
                waiting.append(functions[name])
    return False


def _running(top: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a piece of code, or of a function's body, without the functions that it defines."""
    waiting = list(ast.iter_child_nodes(top))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))


def _is_constant(test: ast.expr) -> bool:
    """Always true, such as `True`, or `(f(1) == 2, "message")`, a tuple that is not empty."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    return isinstance(test, ast.Tuple) or not any(isinstance(node, ast.Name) for node in ast.walk(test))
