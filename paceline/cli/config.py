"""`paceline config [WORDS]`: every key with type, default and meaning; found by words, or explained one by one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from paceline.cli import make_parser
from paceline.config.describe import description, type_name, value_text
from paceline.config.dialect.choices import REFUSED_CHOICES
from paceline.config.dialect.translation import RULES, rule_for
from paceline.config.keys import Key, known_keys, nearest_key, walk_keys
from paceline.text import nearest

EXAMPLES = (
    "",
    "clip                                        keys with the word in their name or meaning",
    "kl loss                                     with both words",
    "trainer                                     the keys of a section",
    "actor_rollout_ref.actor.clip_ratio          one key, and its neighbours",
)


def main(argv: Sequence[str]) -> int:
    """Print keys. Gives the exit code: 1 if nothing was found."""
    parser = make_parser("config", "Look up the keys of the configuration.", EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a key, a section, or words to look for")
    words = parser.parse_args(argv).words
    if len(words) == 1 and words[0] in known_keys():
        print(explain(known_keys()[words[0]]))
        return 0
    found = [line for key in walk_keys() if not key.is_section and matches(key, words) for line in entry(key)]
    of_verl = list(keys_of_verl(words)) if words else []
    if not found:
        print("\n".join(of_verl) or not_found(words), file=sys.stderr)
        return 1
    print("\n".join([*found, *(["", "Keys of verl's:", *of_verl] if of_verl else [])]))
    return 0


def matches(key: Key, words: Iterable[str]) -> bool:
    """Whether all words are somewhere in the key's name or description."""
    text = f"{key.name} {description(key)}".lower()
    return all(word.lower() in text for word in words)


def entry(key: Key) -> list[str]:
    """A key in a list: name, type and default on one line, the meaning under it."""
    if key.is_section:
        return [f"{key.name}.*", *_wrapped(description(key))]
    return [f"{key.name} ({type_name(key.hint)}) = {value_text(key.default)}", *_wrapped(description(key))]


def explain(key: Key) -> str:
    """One key with its neighbours, or one section with its keys."""
    if key.is_section:
        below = [other for other in walk_keys() if other.name.rpartition(".")[0] == key.name]
        return "\n".join([key.name, *_wrapped(description(key)), "", *(line for k in below for line in entry(k))])
    section = key.name.rpartition(".")[0]
    neighbours = [other.name for other in walk_keys() if other.name.rpartition(".")[0] == section and other != key]
    return "\n".join(
        [
            key.name,
            *_wrapped(description(key)),
            "",
            f"  type     {type_name(key.hint)}",
            f"  default  {value_text(key.default)}",
            f"  set it   {key.name}={value_text(key.default)}",
            "",
            f"Neighbours in {section or 'the configuration'}:",
            *(f"  {name}" for name in neighbours),
        ]
    )


def not_found(words: Sequence[str]) -> str:
    """What to say of words that no key has: which keys are spelt like them."""
    asked = " ".join(words)
    parts: dict[str, list[str]] = {}
    for key in known_keys().values():
        for part in {key.field, *key.field.split("_")}:
            parts.setdefault(part, []).append(key.name)
    close = nearest(asked.rpartition(".")[2], parts)
    names = dict.fromkeys([*filter(None, [nearest_key(asked)]), *(parts[close] if close else [])])
    lines = [f"No key has {asked!r} in its name or meaning."]
    return "\n".join([*lines, *(["The nearest:"] if names else []), *(f"  {name}" for name in names)])


def keys_of_verl(words: Sequence[str]) -> Iterator[str]:
    """What becomes of keys of verl's that have all words in their names, and of choices that are refused."""
    asked = " ".join(words)
    rule = rule_for(asked)
    if rule is not None:
        yield f"{asked} {rule.says}"
    else:
        for one in RULES:
            yield from (f"{name} {one.says}" for name in one.names if all(word.lower() in name for word in words))
    for key, choices in REFUSED_CHOICES.items():
        yield from (f"{key}={choice} {choices[choice]}" for choice in choices if choice == asked.lower())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 112, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
