"""Problems of a configuration that another machine need not have: files, folders and packages that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class MachineProblem(str):
    """A problem of this machine rather than of the configuration."""

    __slots__ = ()


def of_this_machine(check: Callable[Arguments, Iterator[str]]) -> Callable[Arguments, Iterator[str]]:
    """Decorator of a check that looks at files and packages: what it yields are MachineProblems."""

    @wraps(check)
    def marked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[str]:
        yield from map(MachineProblem, check(*args, **kwargs))

    return marked
