"""Names for functions that a configuration can choose, and errors that suggest the nearest name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from paceline.config import keys
from paceline.errors import ConfigError

T = TypeVar("T")


def unknown_choice(key: str, asked: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among the known ones; `key` is the configuration key to set."""
    return ConfigError(keys.unknown_choice(key, asked, sorted(known)))


class Registry(Generic[T]):
    """A dictionary that refuses to overwrite an entry and names the nearest entries when one is missing."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the decorated object available as `name`."""

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ValueError(
                    f"{self._key}={name} is already registered as {self._entries[name]!r}; take another name."
                )
            self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """The entry called `name`; ConfigError when there is none."""
        if name not in self._entries:
            raise unknown_choice(self._key, name, self._entries)
        return self._entries[name]
