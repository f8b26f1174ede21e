r"""Is an answer of MATH the right one? What strings and plain numbers settle, and what is left to mathematics.

math-verify reads whatever it is given and is generous: it takes the last side of `41=42`, forgets the base of `42_{16}`
and reads `5t` as 5 tons. So an answer is taken apart here: a list into items, a tuple or an interval into places, a
chain of equalities into sides, a quantity into number and unit. Every part has to be right, and math-verify compares
expressions alone.
"""

from __future__ import annotations

import re
from fractions import Fraction

from paceline.rewards.score.math.answer_checks import AllOf, Check, Matching, OneOf, Pair
from paceline.rewards.score.math.answer_text import (
    WORDS,
    base_numeral,
    clean,
    is_name,
    number,
    plain,
    split_items,
    split_sides,
    split_unit,
    without_percent,
)


def compare(gold: str, answer: str) -> Check:
    """What decides whether an answer, the content of a box, is right."""
    return _compare(clean(gold), clean(answer))


def num_items(gold: str) -> int:
    """How many answers a gold answer has: more than one if it is a list."""
    return len(_items(clean(gold)))


def normal_form(answer: str) -> str:
    r"""One string for the spellings of an answer that are equal as text.

    >>> normal_form(r"x = \dfrac34 \text{ cups}"), normal_form(r"\$1{,}000.")
    ('\\frac{3}{4}', '1000')
    """
    text = clean(answer)
    values = _values(split_sides(text))
    return plain(split_unit(values[0] if len(values) == 1 else text)[0])


MAX_ITEMS = 50
"""A list of more items, or a chain of more sides, is compared as a string."""


def _compare(gold: str, answer: str) -> Check:
    if not answer:
        return not gold
    if plain(gold) == plain(answer) and not _is_same_digits_only(gold, answer):
        return True
    if "\\ldots" in answer and "\\ldots" not in gold:
        return False
    golds, answers = _items(gold), _items(answer)
    if len(golds) > 1 or len(answers) > 1:
        return _compare_lists(gold, golds, answer, answers)
    [gold], [answer] = golds or [""], answers or [""]
    gold, answer = _without_membership(gold), _without_membership(answer)
    if len(split_sides(gold)) > 1 or len(split_sides(answer)) > 1:
        return _compare_equalities(gold, answer)
    gold_brackets, answer_brackets = _bracketed(gold), _bracketed(answer)
    if gold_brackets and answer_brackets:
        return _compare_places(gold_brackets, answer_brackets)
    return _compare_quantities(gold, answer)


def _is_same_digits_only(gold: str, answer: str) -> bool:
    """`81, 256` and `81,256` may have the same plain string, yet are a list and a number."""
    return len(_items(gold)) != len(_items(answer))


# Lists and sets


def _items(text: str) -> list[str]:
    r"""The items of a list or a set, with both values of a `\pm`; an answer that is neither is its only item."""
    text = text.strip()
    inner = text
    if re.fullmatch(r"\\\{[^|:]*\\\}", text) and "\\}" not in text[2:-2] and "\\mid" not in text:
        inner = text[2:-2]
    items = split_items(inner)
    return [value for item in items for value in _both_signs(item)]


def _both_signs(item: str) -> list[str]:
    if item.count("\\pm") != 1:
        return [item]
    upper, lower = item.replace("\\mp", "-").replace("\\pm", "+"), item.replace("\\mp", "+").replace("\\pm", "-")
    return [upper.strip().removeprefix("+").strip(), lower.strip()]


def _compare_lists(gold: str, golds: list[str], answer: str, answers: list[str]) -> Check:
    # A point may be written without its brackets, and a list with them.
    for bracketed, other in ((gold, answers), (answer, golds)):
        places = _bracketed(bracketed) if len(other) > 1 else None
        is_set = gold.startswith("\\{") or answer.startswith("\\{")
        if places and places[0] == "()" and not is_set and len(places[1]) == len(other):
            pairs = zip(places[1], other, strict=True) if bracketed is gold else zip(other, places[1], strict=True)
            return AllOf(tuple(_compare(*pair) for pair in pairs))
    if len(golds) != len(answers) or len(golds) > MAX_ITEMS:
        return False
    if any(len(word) > 1 for item in golds for word in WORDS.findall(item) if word.isalpha()):
        return AllOf(tuple(_compare(*pair) for pair in zip(golds, answers, strict=True)))  # words in an order
    return Matching(tuple(tuple(_compare(one, other) for other in answers) for one in golds))


# Tuples and intervals


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """The two brackets, and what stands between their commas, of a tuple or an interval."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or not _is_one_bracket(text):
        return None
    places = split_items(text[1:-1])
    return (text[0] + text[-1], places) if len(places) > 1 else None


def _is_one_bracket(text: str) -> bool:
    """Whether the first bracket is closed by the last; (1,2)(3,4) are two."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return position == len(text) - 1
    return False


def _compare_places(gold: tuple[str, list[str]], answer: tuple[str, list[str]]) -> Check:
    if gold[0] != answer[0] or len(gold[1]) != len(answer[1]):
        return False
    return AllOf(tuple(_compare(*pair) for pair in zip(gold[1], answer[1], strict=True)))


# Equalities


def _without_membership(text: str) -> str:
    r"""`x \in [1,2]` is `[1,2]`."""
    name, mark, rest = text.partition("\\in ")
    if not mark:
        name, mark, rest = text.partition("\\in[")
        rest = "[" + rest
    return rest.strip() if mark and is_name(name.strip()) else text


def _compare_equalities(gold: str, answer: str) -> Check:
    """Every side that is a value has to be right: `6 * 7 = 42` and `x = 42` are 42, `41 = 42` is not."""
    gold_sides, answer_sides = split_sides(gold), split_sides(answer)
    if not all(gold_sides) or not all(answer_sides) or len(answer_sides) > MAX_ITEMS:
        return False
    if len(gold_sides) == 1:
        return AllOf(tuple(_compare(gold, value) for value in _values(answer_sides)))
    names = [side for side in gold_sides if is_name(side) and not re.search("[-+*/]", side)]  # x + y = 0 is an equation
    gold_values = [side for side in gold_sides if side not in names] or gold_sides[-1:]
    is_equation = not names and any(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", side)) for side in gold_sides)
    if len(answer_sides) == 1:
        return False if is_equation else AllOf(tuple(_compare(value, answer) for value in gold_values))
    answer_names = [side for side in answer_sides if is_name(side)]
    if names and answer_names and plain(names[0]) == plain(answer_names[0]):
        return AllOf(tuple(_compare(gold_values[-1], value) for value in _values(answer_sides)))
    if len(gold_sides) > 2 or len(answer_sides) > 2 or all(number(plain(side)) is not None for side in answer_sides):
        return False
    return Pair(gold, answer)


def _values(sides: list[str]) -> list[str]:
    """The sides without the name of the answer; of names alone, the last. In `x^2 + 1 = x`, x is not a name."""
    values = [side for side in sides if not is_name(side)]
    letters = re.sub(r"\\[a-zA-Z]+", "", " ".join(values))
    return [side for side in sides if side in values or (is_name(side) and side in letters)] or sides[-1:]


# Numbers, quantities, words


def _compare_quantities(gold: str, answer: str) -> Check:
    gold_base, answer_base = base_numeral(gold), base_numeral(answer)
    if answer_base or gold_base:
        return _compare_bases(gold, gold_base, answer, answer_base)
    if ":" in gold + answer and not re.search(r"\\\{|\\mid", gold + answer):
        return _compare_ratios(gold, answer)
    gold_share, answer_share = without_percent(gold), without_percent(answer)
    if gold_share is not None or answer_share is not None:
        return _compare_shares(gold, gold_share, answer, answer_share)
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    return _compare_expressions(gold, answer)


def _compare_bases(gold: str, gold_base: object, answer: str, answer_base: tuple[str, int] | None) -> Check:
    """A numeral with a base is right in that base; without one, the question has said which it is."""
    if answer_base is None:
        return isinstance(gold_base, tuple) and gold_base[1] > 0 and plain(answer).upper() == gold_base[0]
    if gold_base is None:
        return _compare(gold, answer_base[0]) if answer_base[1] == 10 else False
    return answer_base == gold_base and answer_base[1] > 0


_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?(?:[ap]m)?")


def _compare_ratios(gold: str, answer: str) -> Check:
    r"""A time is compared as it is written; the ratio 1:2 is also \frac{1}{2}."""
    times = [plain(text).lower().replace(".", "") for text in (gold, answer)]
    if times[0] == times[1]:
        return True
    if any(_TIME.fullmatch(time) for time in times):
        return False
    gold_parts, answer_parts = gold.split(":"), answer.split(":")
    if not all(part.strip() for part in gold_parts + answer_parts):
        return False
    if len(gold_parts) > 2 or len(answer_parts) > 2:
        if len(gold_parts) != len(answer_parts):
            return False
        return AllOf(tuple(_compare(*pair) for pair in zip(gold_parts, answer_parts, strict=True)))
    return _compare_expressions(_as_fraction(gold_parts), _as_fraction(answer_parts))


def _as_fraction(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else rf"\frac{{{parts[0].strip()}}}{{{parts[1].strip()}}}"


def _compare_shares(gold: str, gold_share: str | None, answer: str, answer_share: str | None) -> Check:
    """25% may be written as 25 where a question asks for percent, and as 0.25."""
    if "%" in (gold_share or "") + (answer_share or ""):
        return False
    if gold_share is not None and answer_share is not None:
        return _compare(gold_share, answer_share)
    if gold_share is not None:
        return OneOf((_compare(gold_share, answer), _compare_expressions(rf"\frac{{{gold_share}}}{{100}}", answer)))
    assert answer_share is not None
    asked_in_percent = abs(number(plain(gold)) or Fraction(0)) >= 1  # 0.5 is not 0.5%
    as_share = _compare_expressions(gold, rf"\frac{{{answer_share}}}{{100}}")
    return OneOf((as_share, _compare(gold, answer_share))) if asked_in_percent else as_share


def _compare_expressions(gold: str, answer: str) -> Check:
    plain_gold, plain_answer = plain(gold), plain(answer)
    if plain_gold == plain_answer:
        return True
    if WORDS.search(gold) and re.fullmatch(r"[a-zA-Z().,\s]*", plain_gold):
        return plain_gold.casefold() == plain_answer.casefold()
    if WORDS.search(answer) and not WORDS.search(gold):
        return _compare_expressions(gold, plain_answer) if WORDS.fullmatch(answer) else False
    gold_number, answer_number = number(plain_gold), number(plain_answer)
    if gold_number is not None and answer_number is not None:
        return _equal_numbers(gold_number, answer_number, is_fraction="frac" in plain_gold + plain_answer)
    if re.search(r"(?<![_^\d])\d+[ ']+\d", plain_answer):  # 4 2 is neither 42 nor 8
        return False
    return Pair(gold, answer if answer_number != 0 else "0")


def _equal_numbers(gold: Fraction, answer: Fraction, is_fraction: bool) -> bool:
    """Equal, or a fraction and its first six decimals."""
    difference = abs(gold - answer)
    return difference == 0 or (is_fraction and difference < Fraction(1, 10**6) and difference < abs(gold) / 10**4)
