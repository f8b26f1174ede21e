"""The keys of the configuration as data: walked from the dataclasses, so that nothing lists them twice."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.config import AnyRunConfig, PPOConfig
from paceline.config.field_rules import Names, OnlyWith, Range
from paceline.text import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Rule = TypeVar("Rule")

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Key:
    """One key, such as trainer.nnodes, or one section, such as trainer."""

    name: str
    """Full name, with dots."""
    hint: object
    """Its resolved type; the dataclass of a section."""
    default: Any
    """Its default; the default dataclass of a section."""
    owner: type
    """The dataclass that has it as a field."""
    rules: tuple[object, ...] = ()
    """What the field's type says beside the type itself: see paceline/config/field_rules.py."""
    sections: tuple[Key, ...] = ()
    """The sections that it is in, from the outermost."""

    def rule(self, kind: type[Rule]) -> Rule | None:
        """The key's own rule of this kind, if it has one."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    @property
    def range(self) -> Range | None:
        """The numbers that it may be."""
        return self.rule(Range)

    @property
    def names(self) -> Names | None:
        """What its text is the name of."""
        return self.rule(Names)

    @property
    def only_with(self) -> OnlyWith | None:
        """The part of a run without which it, or a section that it is in, has no effect."""
        return next((part for key in (self, *reversed(self.sections)) if (part := key.rule(OnlyWith))), None)

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.hint)

    @property
    def field(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def walk_keys(config: DataclassInstance | None = None) -> Iterator[Key]:
    """Every section and key in order, of a PPOConfig or of a dataclass like it."""
    yield from _walk(PPOConfig() if config is None else config, "", ())


def _walk(section: DataclassInstance, prefix: str, sections: tuple[Key, ...]) -> Iterator[Key]:
    owner = type(section)
    hints, annotated = get_type_hints(owner), get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(section):
        name, default = field.name, getattr(section, field.name)
        key = Key(prefix + name, hints[name], default, owner, tuple(_rules(annotated[name])), sections)
        yield key
        if key.is_section:
            yield from _walk(default, key.name + ".", (*sections, key))


def _rules(hint: object) -> Iterator[object]:
    """The rules of a type and, of X | None, of its members; the items of a list have none of the key's."""
    if get_origin(hint) is Annotated:
        kind, *rules = get_args(hint)
        yield from _rules(kind)
        yield from rules
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _rules(member)


def known_keys(root: type[AnyRunConfig] = PPOConfig) -> dict[str, Key]:
    """All sections and keys of a kind of run by full name."""
    hashable: Any = root
    return _keys_of(hashable)


@cache
def _keys_of(root: Any) -> dict[str, Key]:
    return {key.name: key for key in walk_keys(root())}


def item_section(hint: object) -> type[Any] | None:
    """Of a key that holds sections under names of the user's own, the dataclass of one of them."""
    args = get_args(hint)
    is_one = get_origin(hint) is dict and isinstance(args[1], type) and dataclasses.is_dataclass(args[1])
    return args[1] if is_one else None


def value_of(config: AnyRunConfig, name: str) -> Any:
    """The value of a key, or the dataclass of a section."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def is_known_key(name: str, root: type[AnyRunConfig] = PPOConfig) -> bool:
    """Whether `name` is a key or section, or lies below a key that holds a dict of the user's own."""
    known = known_keys(root)
    if name in known:
        return True
    parent = name.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    if not parent or get_origin(known[parent].hint) is not dict:
        return False
    item, below = item_section(known[parent].hint), name[len(parent) + 1 :].partition(".")[2]
    return item is None or below in ("", *(key.name for key in walk_keys(item())))


def nearest_key(name: str, root: type[AnyRunConfig] = PPOConfig) -> str | None:
    """The known key that `name` was probably meant to be; None if no key is really like it.

    What is compared is the last part of a name: that sections are the same makes two keys no more alike.

    >>> nearest_key("actor_rollout_ref.actor.clip_ration")
    'actor_rollout_ref.actor.clip_ratio'
    >>> nearest_key("actor_rollout_ref.clip_ratio")
    'actor_rollout_ref.actor.clip_ratio'
    >>> nearest_key("actor_rollout_ref.rollout.max_model_len")
    """
    section, _, field = name.rpartition(".")
    keys = known_keys(root).values()
    if longer := [key.name for key in keys if key.name.startswith(f"{name}_")]:
        return min(longer, key=len)
    beside = {key.field for key in keys if key.name.rpartition(".")[0] == section}
    if close := nearest(field, beside):
        return f"{section}.{close}".lstrip(".")
    # In another section a field must be the same, or nearly; where several have it, the section must be alike, too.
    elsewhere = nearest(field, {key.field for key in keys}, at_least=0.85)
    names = [key.name for key in keys if key.field == elsewhere]
    return names[0] if len(names) == 1 else nearest(name, names)
