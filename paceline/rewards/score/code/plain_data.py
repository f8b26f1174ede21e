"""Plain data and its JSON: all that crosses between a program, its judge and us.

Runs here, and inside jails as the first part of a script: imports nothing but the standard library.
"""

from __future__ import annotations

import importlib
import itertools
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

DEEPEST = 200
LONGEST_ITERATION = 10_000
"""So many items of an iterator cross; who asks for more gets an error."""
LARGEST_NUMBER = 1 << 62
"""Larger ones travel as text."""
FROM_LIBRARY = {"deque": "collections", "Fraction": "fractions", "Decimal": "decimal"}
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class MalformedError(ValueError):
    """JSON that stands for no plain data."""


def encode(value: Any, refer: Callable[[object], object], depth: int = 0) -> object:
    """JSON for a value; `refer(value)` is the JSON for an object that is not plain data."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < LARGEST_NUMBER else {"type": "int", "value": hex(number)}
    if isinstance(value, str):
        return str(value)
    if depth > DEEPEST:
        raise RecursionError(f"data nested deeper than {DEEPEST}")

    def items(values: Any) -> list[object]:
        return [encode(item, refer, depth + 1) for item in values]

    if isinstance(value, (list, *_VIEWS)):
        return items(value)
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"type": kind.__name__, "value": items(value)}
    if isinstance(value, dict):
        return {"type": "dict", "value": [items(pair) for pair in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"type": "bytes", "value": value.hex()}
    if isinstance(value, complex):
        return {"type": "complex", "value": [value.real, value.imag]}
    if isinstance(value, range):
        return {"type": "range", "value": items((value.start, value.stop, value.step))}
    for name, module in FROM_LIBRARY.items():
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(value, found):
            return {"type": name, "value": items(value) if name == "deque" else str(value)}
    if hasattr(type(value), "__next__"):
        held = items(itertools.islice(value, LONGEST_ITERATION + 1))
        return {"type": "iterator" if len(held) <= LONGEST_ITERATION else "endless", "value": held}
    return refer(value)


def decode(value: Any, find: Callable[[str, Any], object], depth: int = 0) -> object:
    """The value again, of exactly the types named here; `find(type, value)` is asked for all others.

    Raises a `MalformedError` for anything else: whoever wrote it may mean harm.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > DEEPEST + 1:
        raise MalformedError("nested too deep")

    def items(values: object) -> list[Any]:
        if type(values) is not list:
            raise MalformedError("not a list")
        return [decode(item, find, depth + 1) for item in values]

    if type(value) is list:
        return items(value)
    if type(value) is not dict or set(value) != {"type", "value"} or type(value["type"]) is not str:
        raise MalformedError("no plain data")
    kind, held = value["type"], value["value"]
    try:
        if kind == "int":
            return int(held, 16)
        if kind == "bytes":
            return bytes.fromhex(held)
        if kind == "dict":
            return dict(map(items, held))
        if kind == "iterator":
            return iter(items(held))
        if kind == "endless":
            return _and_no_more(items(held))
        if kind in ("complex", "range"):
            return {"complex": complex, "range": range}[kind](*items(held))
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items(held))
        if kind in FROM_LIBRARY:
            made: Callable[[object], object] = getattr(importlib.import_module(FROM_LIBRARY[kind]), kind)
            return made(items(held) if kind == "deque" else held)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise MalformedError(str(error)) from None
    return find(kind, held)


def _and_no_more(items: list[object]) -> Iterator[object]:
    yield from items
    raise OverflowError(f"an iterator with more than {LONGEST_ITERATION} items")
