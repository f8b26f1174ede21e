"""`@register`: makes a worker's method callable on the whole group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from paceline.single_controller.base.dispatch import Dispatch, DispatchMode

_MARK = "__paceline_registration__"
_F = TypeVar("_F", bound=Callable[..., Any])


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    """Every rank that the dispatch mode names."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone, with the arguments it would have got; the result is its own."""


@dataclass(frozen=True)
class Registration:
    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[_F], _F]:
    """Make a method of a worker callable on its group.

    With `blocking=True` the call gives its result; with False a `DataProtoFuture`, whose `.get()` gives it, and which
    other groups take as an argument. An override in a subclass keeps the registration unless it has its own. A method
    may be `async def`: it runs to its end before the worker's next call.
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(f"register takes a dispatch mode, e.g. @register(Dispatch.ONE_TO_ALL); got {dispatch_mode!r}.")
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"register takes Execute.ALL or Execute.RANK_ZERO as execute_mode; got {execute_mode!r}.")

    def mark(method: _F) -> _F:
        setattr(method, _MARK, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The registered methods of a class by name, those of its bases included."""
    found: dict[str, Registration] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if hasattr(attribute, _MARK):
                found[name] = getattr(attribute, _MARK)
    return found
