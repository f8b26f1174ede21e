"""What can be said of a key of verl's that is not a key here: another name, so anyway, without effect, or refused.

A rule has a pattern of keys and says what becomes of one of them with its value. The tables of rules are beside this
module; paceline/config/dialect/translation.py applies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

Kind = Literal["renamed", "so anyway", "no effect"]


class Lookup(Protocol):
    """How a rule sees the other keys of a run: ours with what was translated so far, and those of verl's as asked."""

    def __call__(self, key: str) -> object: ...


@dataclass(frozen=True)
class Asked:
    """One key of verl's with its value."""

    key: str
    value: object
    parts: tuple[str, ...]
    """What the wildcards of the rule's pattern stood for."""
    look_up: Lookup


@dataclass(frozen=True)
class Became:
    """The request goes on under keys of ours."""

    settings: Mapping[str, object]
    why: str = ""


@dataclass(frozen=True)
class Taken:
    """Nothing is to be set: it is so anyway, or it has no effect here. `why` is a sentence without its end."""

    why: str
    kind: Literal["so anyway", "no effect"] = "so anyway"


@dataclass(frozen=True)
class Refused:
    """What follows the key (and its value, if the sentence is about that) in the message."""

    sentence: str
    is_about_value: bool = False


Outcome = Became | Taken | Refused


@dataclass(frozen=True)
class Rule:
    """What becomes of the keys that a pattern names.

    In a pattern `*` is one part of a name, `**` the rest of it, `{a,b}` one of several; each stands for a group of
    the regular expression, which targets call \\1, \\2.
    """

    pattern: str
    act: Callable[[Asked], Outcome]
    says: str
    """For pages and lists of keys: what becomes of it."""
    is_family: bool = field(default=False, kw_only=True)
    """For what is left of a section: a key that is spelt nearly like one of ours is taken for a mistake."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return _regex(self.pattern)

    @property
    def names(self) -> list[str]:
        """The pattern with its alternatives written out."""
        return _written_out(self.pattern)


def _regex(pattern: str) -> re.Pattern[str]:
    pieces = []
    for token in re.findall(r"\*\*|\*|\{[^}]*\}|[^*{]+", pattern):
        if token == "**":
            pieces.append("(.+)")
        elif token == "*":
            pieces.append(r"([^.]+)")
        elif token.startswith("{"):
            pieces.append(f"({'|'.join(re.escape(name) for name in token[1:-1].split(','))})")
        else:
            pieces.append(re.escape(token))
    return re.compile("".join(pieces))


def _written_out(pattern: str) -> list[str]:
    """
    >>> _written_out("{a,b}.x.{c,d}")
    ['a.x.c', 'a.x.d', 'b.x.c', 'b.x.d']
    """
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [rest for name in match[1].split(",") for rest in _written_out(f"{before}{name}{after}")]


def renamed(pattern: str, target: str) -> Rule:
    """The same under another name; the target may itself be a key of verl's, for which another rule stands."""

    def act(asked: Asked) -> Outcome:
        match = _regex(pattern).fullmatch(asked.key)
        assert match is not None
        return Became({match.expand(target): asked.value})

    return Rule(pattern, act, f"-> {_readable(pattern, target)}")


def _readable(pattern: str, target: str) -> str:
    """A target with the wildcards of its pattern instead of \\1, \\2."""
    tokens = re.findall(r"\*\*|\*|\{[^}]*\}", pattern)
    return re.sub(r"\\(\d)", lambda number: tokens[int(number[1]) - 1], target)


def so_anyway(pattern: str, *values: object, why: str, otherwise: str, is_family: bool = False) -> Rule:
    """These values ask for what is done anyway; null, too. Another is refused: `otherwise` follows `key=value`."""

    def act(asked: Asked) -> Outcome:
        if asked.value is None or any(is_same(asked.value, value) for value in values):
            return Taken(why)
        return Refused(otherwise, is_about_value=True)

    shown = " or ".join(show(value) for value in values) or "null"
    return Rule(pattern, act, f"{shown}: {why}. Another value {otherwise}", is_family=is_family)


def no_effect(pattern: str, why: str) -> Rule:
    """Any value is taken: the key is about how something is done, never about the result."""
    return Rule(pattern, lambda asked: Taken(why, "no effect"), f"has no effect here: {why}.")


def refused(pattern: str, sentence: str, *, is_family: bool = False) -> Rule:
    """What we do not have, and what to do; null asks for nothing."""

    def act(asked: Asked) -> Outcome:
        return Taken("null asks for nothing") if asked.value is None else Refused(sentence)

    return Rule(pattern, act, sentence, is_family=is_family)


def switched(section: str, sentence: str, *, why: str, switch: str = "enable") -> Rule:
    """A section of something that we do not have: taken while its switch is off, else refused."""

    def act(asked: Asked) -> Outcome:
        name = asked.key.removesuffix(f".{asked.parts[-1]}")
        return Refused(sentence) if is_on(asked.look_up(f"{name}.{switch}")) else Taken(why)

    return Rule(f"{section}.**", act, f"While {switch} is off: {why}. On, it {sentence}")


def translated(pattern: str, act: Callable[[Asked], Outcome]) -> Rule:
    """By a function, whose docstring says what it does in words for readers of the table."""
    return Rule(pattern, act, " ".join((act.__doc__ or "").split()))


def is_same(asked: object, value: object) -> bool:
    """Equal as a person would say: 1 and 1.0 and "1", True and "true", but not True and 1.

    >>> is_same("true", True), is_same("1", 1), is_same(1.0, 1), is_same(True, 1), is_same("SYNC", "sync")
    (True, True, True, False, True)
    """
    if isinstance(asked, bool) or isinstance(value, bool):
        return str(asked).lower() == str(value).lower()
    if isinstance(asked, int | float | str) and isinstance(value, int | float | str):
        try:
            return float(asked) == float(value)
        except ValueError:
            return str(asked).lower() == str(value).lower()
    return asked == value


def show(value: object) -> str:
    """A value as on a command line."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    return str(value)


def is_on(value: object) -> bool:
    """Whether a switch is on, also as text."""
    return is_same(value, True)


def number(value: object) -> float | None:
    """A number, also as text; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
