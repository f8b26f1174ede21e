r"""How an answer of MATH is written: one spelling for what means the same, and where its parts begin and end.

Strings in, strings out; nothing here knows whether two answers are equal.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

__all__ = [
    "WORDS",
    "base_numeral",
    "clean",
    "is_name",
    "number",
    "plain",
    "split_items",
    "split_sides",
    "split_unit",
    "without_percent",
]

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ",
        "°": r"^\circ", "…": r"\ldots ", "，": ", ", "（": "(", "）": ")", "\u00a0": " ",
    }
)  # fmt: skip
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s+")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|mathrm|mathbf|mathit|mathsf)\s*(?=\{)")

WORDS = re.compile(r"\\text\{([^{}]*)\}")
"""Words in a cleaned answer."""


def clean(answer: str) -> str:
    r"""The same answer in plainer LaTeX: one command for fractions, text and spaces; no signs of currency and no
    marks around it; digits that were grouped are joined.

    Digits are joined by `\!`, `{,}` and `\,` before three digits, and by a bare comma; not by a comma and a space.

    >>> clean(r"$\dfrac12$."), clean(r"\$1,\!000"), clean("81, 256"), clean("81,256")
    ('\\frac12', '1000', '81, 256', '81256')
    """
    text = "".join(_ascii_digit(character) for character in answer.translate(_SYMBOLS)).strip()
    for start, end in _WRAPPED:
        if text.startswith(start) and text.endswith(end) and len(text) >= len(start + end):
            text = text[len(start) : len(text) - len(end)].strip()
    text = re.sub(r"(?<=\d)(?:\s*,\s*\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))", "", text)
    text = text.replace("\\!", "").replace("{,}", ",").replace("\\$", "").replace("$", "").replace("\\displaystyle", "")
    text = re.sub(r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?", "", text)
    text = re.sub(r"\\not\s*=|\\neq(?![a-zA-Z])", r"\\ne ", text)
    text = text.replace("^{\\circ}", "^\\circ").replace("\\degree", "^\\circ")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("\\percent", "\\%")
    text = re.sub(r"\\[lc]?dots[bcimo]?(?![a-z])|\.\.\.+", r"\\ldots ", text)
    text = re.sub(r"\\(?:leq|leqslant)(?![a-z])", r"\\le ", re.sub(r"\\(?:geq|geqslant)(?![a-z])", r"\\ge ", text))
    text = _TEXT_COMMAND.sub(r"\\text", text)
    text = _SPACE.sub(" ", text).strip()
    text = text.rstrip(".,; ") if not text.endswith("\\") else text
    text = re.sub(r"^\\approx\s*", "", text)
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text) if _is_outside_brackets(text) else text


def _ascii_digit(character: str) -> str:
    value = None if character.isascii() else unicodedata.decimal(character, None)
    return character if value is None else str(value)


def _is_outside_brackets(text: str) -> bool:
    """In (100,200) the comma is between two numbers."""
    return not re.search(r"[(\[]|\\\{", text)


def plain(text: str) -> str:
    r"""The string by which cleaned answers are compared; spaces stay between digits alone.

    >>> plain(r"\frac12 x"), plain(r"\sqrt3"), plain(".5"), plain("4 2")
    ('\\frac{1}{2}x', '\\sqrt{3}', '0.5', '4 2')
    """
    text = re.sub(r" +", " ", WORDS.sub(lambda match: match[1].strip() or " ", text))
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    text = re.sub(r"\\sqrt([^{\[\\])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([^{\\ ]) ?([^{\\ ])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{\\])\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([^{\\])", r"\1{\2}", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return re.sub(r"^\(([a-zA-Z])\)$", r"\1", text)


_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}")
_LONGEST_NUMBER = 100


def number(text: str) -> Fraction | None:
    """The value of a plain string that is a number or a fraction of whole numbers."""
    if len(text) > _LONGEST_NUMBER:
        return None
    if _PLAIN_NUMBER.fullmatch(text):
        return Fraction(text.rstrip("."))
    fraction = _PLAIN_FRACTION.fullmatch(text)
    if fraction is None or int(fraction[3]) == 0:
        return None
    value = Fraction(int(fraction[2]), int(fraction[3]))
    return -value if fraction[1] else value


_AND = r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
_TOKEN = re.compile(rf"{_AND}|[<>!:]=|\\[a-zA-Z]+|\\?.", re.S)
_ITEM_MARK, _SIDE_MARK = re.compile(rf"[,;]|{_AND}"), re.compile(r"=|\\(?:approx|equiv|cong|simeq|sim)")
_OPENING, _CLOSING = ("{", "(", "[", "\\{", "\\begin"), ("}", ")", "]", "\\}", "\\end")


def split_items(text: str) -> list[str]:
    r"""What stands between the commas, semicolons, `and` and `or` of a list, outside all brackets.

    >>> split_items(r"2, 3, \text{ and } (4, 5)"), split_items(r"\{1, 2\}")
    (['2', '3', '(4, 5)'], ['\\{1, 2\\}'])
    """
    if text.startswith("\\text{") and WORDS.fullmatch(text):
        return [rf"\text{{{word.strip()}}}" for word in re.split(r",| and | or ", text[6:-1]) if word.strip()]
    return [item for item in _split(text, _ITEM_MARK) if item]


def split_sides(text: str) -> list[str]:
    """The sides of an equality or an approximation, or of a chain of them."""
    return _split(text, _SIDE_MARK)


def _split(text: str, mark: re.Pattern[str]) -> list[str]:
    parts, depth = [""], 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth <= 0 and mark.fullmatch(token):
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


_NAME_PART = r"(?:[a-zA-Z]'*|\\(?!pi\b|infty\b|text\b)[a-zA-Z]+(?![a-zA-Z])|\\text\{[^{}\d]*\})"
_INDEX = r"(?:[_^](?:[a-zA-Z0-9]|\{[^{}]*\}))*"
_ARGUMENT = r"(?:\([^()]*\))?"
_NAME = re.compile(rf"(?:{_NAME_PART}{_INDEX}{_ARGUMENT}|\{{(?:[A-Za-z]+)\}}|[-+*/|\s])+")


def is_name(side: str) -> bool:
    r"""Whether a side of an equality is what the answer is called, as `x`, `f(2)`, `\angle ABC`, `a+b`, and no value.

    >>> [is_name(side) for side in ("x_1", "f(2)", "a + b", "7", "7x", r"\pi", "i")]
    [True, True, True, False, False, False, False]
    """
    return len(side) < 60 and side != "i" and bool(_NAME.fullmatch(side)) and bool(re.search("[a-zA-Z]", side))


_BASE = re.compile(r"(-?)(?:\\text)?[{(]?([0-9A-Za-z.]+)[})]?\s*_\s*\{?(?:\\text\{)?(\d+|[a-z]+)\}?\}?")
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
_SUBSCRIPTED_NUMBER = re.compile(r"[\d})\]]\s*_")


def base_numeral(text: str) -> tuple[str, int] | None:
    """The digits and the base of a numeral such as `2516_8`. A base of 0 stands for a number with another subscript."""
    match = _BASE.fullmatch(text)
    if match and re.search(r"\d", match[2]):
        base = int(match[3]) if match[3].isdigit() else _BASE_NAMES.get(match[3], 0)
        return match[1] + (match[2].upper().lstrip("0") or "0"), base
    return ("", 0) if _SUBSCRIPTED_NUMBER.search(text) else None


_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|%|\\%)\s*\}|\bpercent\b)$")


def without_percent(text: str) -> str | None:
    """What stands before a sign of percent; None if there is none."""
    share = _PERCENT.sub("", text)
    return None if share == text else share


_UNIT = re.compile(r"(?<=[\w})\]])\s*(?:\\text\{([^{}]*)\}|\s([a-zA-Z][a-zA-Z .]*))\s*(?:\^\{?([23])\}?)?$")
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(-?\d+(?:\.\d+)?)\s*(?:\\text\{{)?\s*({'|'.join(_POWERS)})\b\s*([a-zA-Z ]*\}}?)")
_SHORT_UNITS = {
    "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "metre": "meter", "metres": "meter",
    "in": "inch", "inches": "inch", "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "g": "gram", "gm": "gram",
    "mg": "milligram", "kg": "kilogram", "lb": "pound", "lbs": "pound", "oz": "ounce", "s": "second", "sec": "second",
    "secs": "second", "min": "minute", "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "l": "liter",
    "litre": "liter", "litres": "liter", "ml": "milliliter", "mph": "mph", "kmh": "kmh", "cents": "cent",
    "usd": "dollar", "sq": "square", "cu": "cubic", "deg": "degree", "degs": "degree",
}  # fmt: skip
_LONG_UNITS = {*_SHORT_UNITS.values(), "day", "week", "month", "year", "gallon", "acre", "euro"}
_PARTS_OF_UNITS = {"per", "of", "a", "an", "the", "units", "unit"}
_OTHER_WORDS = """
    or and not no nor but either neither maybe perhaps if unless except otherwise instead rather versus alternatively
    than more less least most about approximately roughly nearly almost between from to over under by with without plus
    minus times divided multiplied squared cubed root power factorial choose mod modulo log percent half halves double
    twice triple inverse negated base am pm true false wrong right correct incorrect is are was equals equal answer
    point infinity pi pairs pair below above negative positive remainder hexadecimal octal binary
"""
_NO_UNITS = frozenset(_OTHER_WORDS.split())
"""Words that change a quantity or offer another one."""
_NUMBER_WORD = re.compile(
    r"(?:(?:(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie)|third|fif|eigh(?=th)"
    r"|nin(?=th)|twelf|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|hundred|thousand"
    r"|(?:m|b|tr|quadr|quint)illion|dozen|gross|score|lakh|crore|quarter)(?:th)?s?)++"  # possessive: in one pass
)
"""So do these, with their plurals, shares and compounds."""


def split_unit(text: str) -> tuple[str, frozenset[str]]:
    r"""A quantity without its unit, and the unit in one spelling, empty if there is none that is known.

    Words that change the quantity, or that offer another one, are no unit.

    >>> split_unit(r"12\text{ cm}^2") == split_unit("12 square centimeters")
    True
    >>> split_unit(r"3 \text{ million dollars}")[0], split_unit("3 times x")[0], split_unit("18 ways")[0]
    ('3000000', '3 times x', '18')
    """
    if scaled := _SCALED.fullmatch(text):
        rest = scaled[3].strip(" }")
        text = f"{Decimal(scaled[1]).scaleb(_POWERS[scaled[2]]):f}" + (rf"\text{{ {rest}}}" if rest else "")
    circle = text.removesuffix("^\\circ")
    if circle != text and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return circle.strip(), frozenset({"degree"})
    match = _UNIT.search(text)
    if not match:
        return text, frozenset()
    words = (match[1] if match[1] is not None else match[2]).replace(".", " ").replace("-", " ").lower().split()
    if not _are_unit(words, in_text=match[1] is not None):
        return text, frozenset()
    known = {_SHORT_UNITS.get(word, word.removesuffix("s")) for word in words} & (_LONG_UNITS | {"square", "cubic"})
    power = {"2": {"square"}, "3": {"cubic"}}.get(match[3] or "", set())
    return text[: match.start()].strip(), frozenset(known | power) if known else frozenset()


def _are_unit(words: list[str], in_text: bool) -> bool:
    if not words:
        return in_text
    for word in words:
        if word in _SHORT_UNITS or word in _PARTS_OF_UNITS:
            continue
        if not word.isalpha() or len(word) < (3 if in_text else 4):
            return False
        if word in _NO_UNITS or _NUMBER_WORD.fullmatch(word):
            return False
    return in_text or len(words[0]) > 1  # 12 m may be a product
