"""One value as the type of its key, with paths made absolute; and how a message names both."""

from __future__ import annotations

import errno
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

from paceline.config.field_rules import Names
from paceline.files import exists

_TOO_LARGE = 2**63
"""What no file and no tensor can hold."""


class MismatchError(Exception):
    """A value that is not of the wanted type."""


class NoPathError(Exception):
    """A text that can't name a file or a folder."""


class UnknownChoiceError(MismatchError):
    """A text that is none of the choices."""


def without_none(hint: object) -> object:
    """X of X | None; the hint itself if it has no None or more than one other member."""
    members = [member for member in get_args(hint) if member is not type(None)]
    return members[0] if get_origin(hint) in (Union, types.UnionType) and len(members) == 1 else hint


def read_value(value: object, hint: object) -> object:
    """`value` as the type `hint`; raises MismatchError. Numbers may come as text, as from ${oc.env:...} or 1e-6."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = without_none(hint)
        return read_value(value, inner) if inner is not hint else _read_any_of(value, args)
    if origin is Literal:
        if not isinstance(value, str):
            raise MismatchError
        if value not in args:
            raise UnknownChoiceError
        return value
    if origin is list:
        items = [value] if isinstance(value, str) else value  # one name stands for a list of one
        if not isinstance(items, list | tuple):
            raise MismatchError
        return [read_value(item, args[0]) for item in items]
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise MismatchError
        return tuple(read_value(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise MismatchError
        return dict(value)
    if hint is int or hint is float:
        return _read_number(value, hint)
    if not isinstance(hint, type) or not isinstance(value, hint):
        raise MismatchError
    return value


def _read_any_of(value: object, hints: tuple[object, ...]) -> object:
    for hint in hints:
        try:
            return read_value(value, hint)
        except MismatchError:
            continue
    raise MismatchError


def _read_number(value: object, kind: type[int] | type[float]) -> int | float:
    accepted = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise MismatchError
    try:
        number = kind(value)
    except (ValueError, OverflowError) as error:
        raise MismatchError from error
    if not math.isfinite(number) or (kind is int and abs(number) >= _TOO_LARGE):
        raise MismatchError
    return number


def wanted_text(hint: object) -> str:
    """What a type is called in a message.

    >>> wanted_text(int | None)
    'a whole number or null'
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(wanted_text(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is list:
        return f"a list, each item {wanted_text(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each item {wanted_text(args[0])}"
    if origin is dict:
        return "a section with keys of its own"
    names: dict[object, str] = {
        int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"
    }  # fmt: skip
    return names[hint]


def shown_text(value: object) -> str:
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return f"{value:.3g}, which is too large" if abs(value) < 10**300 else "one that is too large"
    return "null" if value is None else f"{value!r} ({type(value).__name__})"


def how_to_quote(key: str, value: object, hint: object) -> str:
    """How to give a number as text on the command line, where that was probably meant."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wants_text = without_none(hint) is str
    return f""" On the command line, quote it twice: "{key}='{value}'".""" if is_number and wants_text else ""


def with_local_paths(value: object, names: Names | None) -> object:
    """Paths with `~` expanded and made absolute: the processes that open them need not share the caller's folder."""
    if isinstance(value, list) and names is Names.PATH:
        return [with_local_paths(item, names) for item in value]
    if not isinstance(value, str) or "://" in value or not value:
        return value
    if names is Names.MODULE and (value.endswith(".py") or (exists(f"{value}.py") and Path(f"{value}.py").is_file())):
        return _absolute(value if value.endswith(".py") else f"{value}.py")
    if names is Names.PATH or (names is Names.MODEL and is_local_path(value)):
        return _absolute(value)
    return value


def _absolute(path: str) -> str:
    """Raises NoPathError for what no file can be called: too long, or with characters that names can't have."""
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        os.stat(absolute)
    except ValueError as error:
        raise NoPathError(str(error)) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise NoPathError(str(error.strerror)) from error
    return absolute


def is_local_path(path: str) -> bool:
    """Whether a model path means a folder here, rather than a hub id such as org/name."""
    return path.startswith(("/", "~", ".")) or path.count("/") > 1 or exists(path)
