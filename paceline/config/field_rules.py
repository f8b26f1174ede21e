"""What a field of the configuration allows, written in its type: `ppo_epochs: Count = 1`.

The loader and the checks find these rules on the keys (paceline/config/keys.py), so no table repeats them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have; null is left to its type.

    >>> Range(0, 1), Range(0, 1, open_low=True), Range(0, 1, open_high=True)
    (in [0, 1], in (0, 1], in [0, 1))
    >>> Range(0, open_low=True), Range(1, also=-1)
    (> 0, >= 1, or -1)
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    also: int | None = None
    """One more value with a meaning of its own, such as -1 for "no limit"."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return (above and below) or (self.also is not None and value == self.also)

    def __repr__(self) -> str:
        if math.isfinite(self.high):
            left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
            return f"in {left}{self.low:g}, {self.high:g}{right}"
        text = f"{'>' if self.open_low else '>='} {self.low:g}"
        return text if self.also is None else f"{text}, or {self.also}"


@dataclass(frozen=True)
class Each:
    """The numbers that each item of a list may be."""

    range: Range


class Names(Enum):
    """What a text is the name of. The loader makes paths absolute."""

    PATH = auto()
    """A file or folder here."""
    MODEL = auto()
    """A folder here, or a hub id."""
    MODULE = auto()
    """A .py file here, or a Python module."""


class OnlyWith(Enum):
    """The part of a run without which a key, or a whole section, has no effect."""

    CRITIC = auto()
    REFERENCE = auto()
    REWARD_MODEL = auto()
    TEACHER = auto()
    VLLM = auto()
    AGENTS = auto()


Count = Annotated[int, Range(1)]
WholeNumber = Annotated[int, Range(0)]
CountOrAll = Annotated[int, Range(1, also=-1)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open_low=True)]
Share = Annotated[float, Range(0, 1)]
Probability = Annotated[float, Range(0, 1, open_low=True)]
Temperature = Annotated[float, Range(0.01)]

LocalPath = Annotated[str, Names.PATH]
LocalPaths = Annotated[str | list[str], Names.PATH]
ModelPath = Annotated[str, Names.MODEL]
ModuleOrFile = Annotated[str, Names.MODULE]

UserDict = dict[str, Any]
"""Keys of the user's own below a key of ours."""
