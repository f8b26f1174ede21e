"""From the keys that people bring from verl to ours: one pass over a configuration before it is read.

Takes the resolved configuration (ours with every default, and what else was given), gives it back with keys of ours
alone, and says what became of the others: renamed or translated, taken because it is so anyway, taken without an
effect, refused. A key that no rule knows is left where it is, for the loader to say which known one is the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from paceline.config.dialect.choices import read_choices, refused_choice
from paceline.config.dialect.engine_keys import ENGINE_RULES
from paceline.config.dialect.rollout_keys import ROLLOUT_RULES
from paceline.config.dialect.rule_kinds import Asked, Kind, Outcome, Refused, Rule, Taken, is_same, show
from paceline.config.dialect.run_keys import RENAMED_SECTIONS, RUN_RULES
from paceline.config.keys import is_known_key, item_section, known_keys, nearest_key
from paceline.config.secrets import masked
from paceline.text import meant

__all__ = ["RULES", "Note", "Translation", "notes_text", "refused_choice", "rule_for", "translate"]

Tree = dict[str, object]

RULES: tuple[Rule, ...] = (*RENAMED_SECTIONS, *RUN_RULES, *ENGINE_RULES, *ROLLOUT_RULES)
"""The first rule whose pattern has a key is the one for it; rules also act in this order, so that one can look at what
those before it did."""


@dataclass(frozen=True)
class Note:
    """What became of a key of verl's that was taken."""

    key: str
    value: object
    kind: Kind
    settings: Mapping[str, object] = field(default_factory=dict)
    """What was set instead."""
    why: str = ""

    def __str__(self) -> str:
        asked = f"{self.key}={_shown(self.key, self.value)}"
        if self.kind != "renamed":
            return f"{asked}: {self.why}."
        became = " ".join(f"{key}={_shown(key, value)}" for key, value in self.settings.items()) or "left out"
        return f"{asked} -> {became}" + (f" ({self.why})" if self.why else "")


@dataclass
class Translation:
    """A configuration in keys of ours, and what was said of the others."""

    tree: Tree
    notes: list[Note] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """Key to message."""


def _shown(key: str, value: object) -> str:
    return show(masked(key, value))


@cache
def rule_for(key: str) -> Rule | None:
    """The rule that a key of verl's falls under; None for a key that is unknown, or probably a mistake."""
    for rule in RULES:
        if rule.regex.fullmatch(key):
            return None if rule.is_family and _is_misspelt(key) else rule
    return None


@cache
def _is_section_of_verls(key: str) -> bool:
    """Whether keys below it are verl's, whatever their names, so that it asks for nothing where it is empty."""
    return any(rule.pattern.endswith(".**") and rule.regex.fullmatch(f"{key}.a") for rule in RULES)


def _is_misspelt(key: str) -> bool:
    close = nearest_key(key)
    return close is not None and close.rpartition(".")[0] == key.rpartition(".")[0]


def translate(tree: Tree) -> Translation:
    """`tree` with keys of verl's replaced by ours."""
    result = Translation(tree)
    leaves = dict(_foreign_leaves(tree, ""))
    foreign = {key: (key, value) for key, value in leaves.items() if rule_for(key) is not None}
    empty = [
        key for key, value in leaves.items() if key not in foreign and value in (None, {}) and _is_section_of_verls(key)
    ]
    if not foreign and not empty and not read_choices(tree):
        return result
    result.tree = _copied(tree)
    for key in (*foreign, *empty):
        _remove(result.tree, key)
    result.notes += [Note(key, leaves[key], "so anyway", why="an empty section asks for nothing") for key in empty]
    _Pass(result, foreign).run()
    _translate_choices(result)
    return result


class _Pass:
    """The keys of one configuration, each under the last name that it was given."""

    def __init__(self, result: Translation, foreign: dict[str, tuple[str, object]]) -> None:
        self.result = result
        self.waiting = dict(foreign)
        """Key of verl's to the key that was asked under, and the value."""
        self.asked: Tree = {key: value for key, (_, value) in foreign.items()}
        self.set_by: dict[str, str] = {}
        self.refused: dict[tuple[str, str], list[str]] = {}
        """Section and sentence to the keys that it is said of."""

    def run(self) -> None:
        """Act on one key after the other, in the order of the table; a renamed one waits again under its new name."""
        while self.waiting:
            key = min(self.waiting, key=lambda name: _place(name))
            origin, value = self.waiting.pop(key)
            rule = rule_for(key)
            if rule is None:  # a new name that nobody knows: an old one with a mistake below it
                self.result.problems[origin] = f"{origin} is not a key{meant(nearest_key(key))}"
                continue
            match = rule.regex.fullmatch(key)
            assert match is not None
            outcome = rule.act(Asked(key, value, match.groups(), self.look_up))
            self.settle(rule, key, origin, value, outcome)
        self.say_refusals()

    def settle(self, rule: Rule, key: str, origin: str, value: object, outcome: Outcome) -> None:
        if isinstance(outcome, Refused):
            shown = f"{origin}={_shown(origin, value)}" if outcome.is_about_value else origin
            via = "" if origin == key or outcome.is_about_value else f" (here {key})"
            self.refuse(rule, key, origin, f"{shown}{via} {outcome.sentence}")
        elif isinstance(outcome, Taken):
            self.result.notes.append(Note(origin, value, outcome.kind, why=outcome.why))
        else:
            ours = {name: item for name, item in outcome.settings.items() if is_known_key(name)}
            for name, item in outcome.settings.items():
                if name not in ours:
                    self.wait(origin, value, name, item)
            conflicts = [problem for name, item in ours.items() if (problem := self.set(origin, name, item, value))]
            if conflicts:
                self.result.problems[origin] = conflicts[0]
            elif ours or not outcome.settings:
                self.result.notes.append(Note(origin, value, "renamed", ours, outcome.why))

    def wait(self, origin: str, asked: object, name: str, value: object) -> None:
        """A key of verl's has become another one, which may be there already."""
        other, found = self.waiting.get(name, (origin, value))
        if other == origin:
            self.waiting[name] = origin, value
            self.asked[name] = value
        elif is_same(found, value):
            self.result.notes.append(Note(origin, asked, "renamed", why=f"it says the same as {other}"))
        else:
            self.result.problems[origin] = (
                f"{origin}={_shown(origin, asked)} is {name} in other words, and so is {other}={_shown(other, found)}. "
                "Set one."
            )

    def refuse(self, rule: Rule, key: str, origin: str, message: str) -> None:
        """One message for all keys of a section of which the same is to be said."""
        match = rule.regex.fullmatch(key)
        assert match is not None
        is_section = rule.pattern.endswith(".**") and not rule.is_family
        section = key[: match.start(match.re.groups) - 1] if is_section else key
        self.refused.setdefault((section, message.removeprefix(origin)), []).append(origin)

    def say_refusals(self) -> None:
        for (section, sentence), origins in self.refused.items():
            others = f" (and below {section}: {', '.join(origins[1:])})" if origins[1:] else ""
            self.result.problems[origins[0]] = f"{origins[0]}{sentence}{others}"

    def set(self, origin: str, key: str, value: object, asked: object) -> str | None:
        """Put a value under a key of ours; a sentence if it already has another one that somebody chose."""
        found = _get(self.result.tree, key)
        default = known_keys()[key].default if key in known_keys() else None
        if found is not None and not is_same(found, value) and (key in self.set_by or not is_same(found, default)):
            other = f"{self.set_by[key]} asks for {key}" if key in self.set_by else key
            return f"{origin}={_shown(origin, asked)} is {key}={show(value)} here, but {other}={show(found)}. Set one."
        self.set_by[key] = origin
        _put(self.result.tree, key, value)
        return None

    def look_up(self, key: str) -> object:
        return self.asked[key] if key in self.asked else _get(self.result.tree, key)


@cache
def _place(key: str) -> int:
    rule = rule_for(key)
    return len(RULES) if rule is None else RULES.index(rule)


def _translate_choices(result: Translation) -> None:
    """Values of our own keys that verl calls otherwise."""
    for key, asked, settings, why in read_choices(result.tree):
        for name, value in settings.items():
            _put(result.tree, name, value)
        result.notes.append(Note(key, asked, "renamed" if settings else "so anyway", settings, why))


def notes_text(notes: Iterable[Note]) -> str:
    """What became of the keys of verl's, by kind; nothing if there were none."""
    heads: dict[Kind, str] = {
        "renamed": "Renamed, or said in our own way:",
        "so anyway": "Taken, because it is so anyway:",
        "no effect": "Taken, without an effect:",
    }
    lines: list[str] = []
    notes = list(notes)
    for kind, head in heads.items():
        if chosen := [f"  {note}" for note in notes if note.kind == kind]:
            lines += [head, *chosen, ""]
    return "\n".join(["Keys of verl's in this configuration", "", *lines, ""]) if lines else ""


def notes_line(notes: Iterable[Note]) -> str:
    """The same in one line for an ordinary start; nothing if there were none."""
    by_kind: dict[str, list[str]] = {}
    for note in notes:
        by_kind.setdefault(note.kind, []).append(note.key)
    return "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in by_kind.items())


# ------------------------------------------------------------------------------------------------ nested dicts


def _foreign_leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Keys that are not ours with their values. A section that a rule names as a whole is one key."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        known = known_keys().get(key)
        if known is not None and not known.is_section and item_section(known.hint) is None:
            continue
        if isinstance(value, Mapping) and value:
            yield from _foreign_leaves(value, f"{key}.")
        elif known is None:
            yield key, value


def _copied(tree: Mapping[str, object]) -> Tree:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _walked(tree: Tree, key: str, make: Callable[[], Tree] | None = None) -> tuple[Tree | None, str]:
    """The innermost section of a key, and the last part of its name."""
    *sections, last = key.split(".")
    node: object = tree
    for name in sections:
        assert isinstance(node, dict)
        below = node.get(name)
        if not isinstance(below, dict):
            if make is None:
                return None, last
            below = node[name] = make()
        node = below
    assert isinstance(node, dict)
    return node, last


def _get(tree: Tree, key: str) -> object:
    section, last = _walked(tree, key)
    return None if section is None else section.get(last)


def _put(tree: Tree, key: str, value: object) -> None:
    section, last = _walked(tree, key, dict)
    assert section is not None
    section[last] = value


def _remove(tree: Tree, key: str) -> None:
    """Take a key out, and the sections that it leaves empty."""
    while key:
        section, last = _walked(tree, key)
        if section is None:
            return
        section.pop(last, None)
        key = key.rpartition(".")[0]
        if section or key in known_keys():
            return
