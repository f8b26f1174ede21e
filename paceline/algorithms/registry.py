"""Names for what a configuration can choose, and errors that suggest the nearest name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar, cast

from paceline.config import keys
from paceline.errors import ConfigError

T = TypeVar("T")
Entry = TypeVar("Entry")


def unknown_choice(key: str, asked: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among the known ones; `key` is the configuration key to set."""
    return ConfigError(keys.unknown_choice(key, asked, sorted(known)))


class Registry(Generic[T]):
    """A dictionary that refuses to overwrite an entry and names the nearest entries when one is missing.

    `modules` are those that register an entry when they are imported, by its name: they are imported when it is first
    asked for, since they may need a heavy or optional package.
    """

    def __init__(self, key: str, modules: Mapping[str, str] | None = None) -> None:
        self._key = key
        self._modules = modules or {}
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator: make the decorated object, a T, available as `name`."""

        def decorate(entry: Entry) -> Entry:
            if name in self._entries:
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
            raise unknown_choice(self._key, name, self._modules.keys() | self._entries)
        return self._entries[name]
