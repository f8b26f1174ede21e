"""Names for what a configuration can choose, and errors that suggest the nearest name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from paceline.errors import ConfigError
from paceline.text import unknown_choice

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Generic[T]):
    """A dictionary that refuses another entry under a name that is taken, and names the nearest when one is missing.

    `modules` are those that register an entry when they are imported, by its name: they are imported when it is first
    asked for, since they may need a heavy or optional package.
    """

    def __init__(self, key: str, modules: Mapping[str, str] | None = None) -> None:
        self._key = key
        self._modules = modules or {}
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator: make the decorated object, a T, available as `name`.

        The same object may be registered again, also from a module that was imported twice; the latest is kept.
        """

        def decorate(entry: Entry) -> Entry:
            if name in self._entries and _identity(self._entries[name]) != _identity(entry):
                raise ConfigError(
                    f"{self._key}={name} is already registered as {self._entries[name]!r}; take another name."
                )
            self._entries[name] = cast(T, entry)
            return entry

        return decorate

    def get(self, name: str) -> T:
        """The entry called `name`; ConfigError when there is none."""
        if name not in self._entries and name in self._modules:
            importlib.import_module(self._modules[name])
        if name not in self._entries:
            raise ConfigError(unknown_choice(self._key, name, sorted(self._modules.keys() | self._entries)))
        return self._entries[name]


def _identity(entry: Any) -> Any:
    """What two imports of a function or class have in common: where it is defined. Of a record, that of its fields."""
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        return tuple(_identity(getattr(entry, field.name)) for field in dataclasses.fields(entry))
    name = getattr(entry, "__qualname__", "<")
    return entry if "<" in name else (entry.__module__, name)  # a lambda or an inner function has no name of its own
