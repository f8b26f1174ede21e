"""The keys of the configuration as data: walked from the dataclasses, so that nothing lists them twice."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from paceline.config import PPOConfig


@dataclass(frozen=True)
class Key:
    """One key, such as trainer.nnodes, or one section, such as trainer."""

    name: str
    """Full name, with dots."""
    hint: Any
    """Its resolved type; the dataclass of a section."""
    default: Any
    """Its default; the default dataclass of a section."""
    owner: type
    """The dataclass that has it as a field."""

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.hint)

    @property
    def field(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def walk_keys(section: Any = None, prefix: str = "") -> Iterator[Key]:
    """Every section and key below `section` (a dataclass instance; all of PPOConfig without one), in order."""
    section = PPOConfig() if section is None else section
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key = Key(prefix + field.name, hints[field.name], getattr(section, field.name), type(section))
        yield key
        if key.is_section:
            yield from walk_keys(key.default, key.name + ".")


@cache
def known_keys() -> dict[str, Key]:
    """All sections and keys by full name."""
    return {key.name: key for key in walk_keys()}


def is_known_key(name: str) -> bool:
    """Whether `name` is a key or section, or lies below a key that holds a dict of the user's own."""
    if name in known_keys():
        return True
    parent = name.rpartition(".")[0]
    while parent and parent not in known_keys():
        parent = parent.rpartition(".")[0]
    return bool(parent) and get_origin(known_keys()[parent].hint) is dict


def nearest_key(name: str) -> str | None:
    """The known key that `name` was probably meant to be.

    >>> nearest_key("actor_rollout_ref.actor.clip_ration")
    'actor_rollout_ref.actor.clip_ratio'
    >>> nearest_key("actor_rollout_ref.clip_ratio")
    'actor_rollout_ref.actor.clip_ratio'
    """
    field = name.rpartition(".")[2]
    longer = [known for known in known_keys() if known.startswith(name + "_")]
    same_field = [key.name for key in known_keys().values() if key.field == field]
    return (
        nearest(name, same_field, cutoff=0.0)
        or nearest(name, longer, cutoff=0.0)
        or nearest(name, known_keys(), cutoff=0.8)
        or _nearest_field(field)
        or nearest(name, known_keys(), cutoff=0.6)
    )


def _nearest_field(field: str) -> str | None:
    """A key whose last part is spelt nearly like `field`, if there is exactly one."""
    close = nearest(field, {key.field for key in known_keys().values()}, cutoff=0.75)
    names = [key.name for key in known_keys().values() if key.field == close]
    return names[0] if len(names) == 1 else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of the known names, if any is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def unknown_choice(key: str, asked: str, known: Iterable[str]) -> str:
    """What to say of a value that is none of the known ones.

    >>> unknown_choice("trainer.resume_mode", "atuo", ["auto", "disable"])
    "trainer.resume_mode='atuo' is not known; did you mean auto? Known: auto, disable."
    """
    names = list(known)
    close = nearest(asked, names)
    hint = f"; did you mean {close}?" if close else "."
    return f"{key}={asked!r} is not known{hint} Known: {', '.join(names)}."
