"""The keys of the configuration as data: walked from the dataclasses, so that nothing lists them twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from paceline.config import PPOConfig
from paceline.text import nearest


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
    """The known key that `name` was probably meant to be; None if no key is really like it.

    What is compared is the last part of a name: that sections are the same makes two keys no more alike.

    >>> nearest_key("actor_rollout_ref.actor.clip_ration")
    'actor_rollout_ref.actor.clip_ratio'
    >>> nearest_key("actor_rollout_ref.clip_ratio")
    'actor_rollout_ref.actor.clip_ratio'
    >>> nearest_key("actor_rollout_ref.rollout.max_model_len")
    """
    section, _, field = name.rpartition(".")
    keys = known_keys().values()
    if longer := [key.name for key in keys if key.name.startswith(f"{name}_")]:
        return min(longer, key=len)
    beside = {key.field for key in keys if key.name.rpartition(".")[0] == section}
    if close := nearest(field, beside):
        return f"{section}.{close}".lstrip(".")
    # In another section a field must be the same, or nearly; where several have it, the section must be alike, too.
    elsewhere = nearest(field, {key.field for key in keys}, at_least=0.85)
    names = [key.name for key in keys if key.field == elsewhere]
    return names[0] if len(names) == 1 else nearest(name, names)


def unknown_choice(key: str, asked: str, known: Iterable[str]) -> str:
    """What to say of a value that is none of the known ones.

    >>> unknown_choice("trainer.resume_mode", "atuo", ["auto", "disable"])
    "trainer.resume_mode='atuo' is not known; did you mean auto? Known: auto, disable."
    """
    names = list(known)
    close = nearest(asked, names)
    hint = f"; did you mean {close}?" if close else "."
    return f"{key}={asked!r} is not known{hint} Known: {', '.join(names)}."
