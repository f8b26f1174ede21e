"""Launch scripts read, not run: the commands of a shell script with their variables filled in.

A small part of the shell's language: assignments, `export`, arrays, quotes, line continuations, comments, `${X:-y}` and
its relatives, `$((a + b))` with whole numbers, `if`, `case`, functions. Nothing is executed: `$(command)` stays as it
is written, of a `for` loop the first round is taken, and what was not understood is said in `remarks`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cli.shell_values import any_of, computed, cut
from paceline.cli.shell_words import Token, Word, tokens_of

_DEEPEST = 50
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)", re.DOTALL)
_EXPANSION = re.compile(r"([A-Za-z_]\w*|[0-9@*#?$])(\[[@*\w]+\])?(.*)", re.DOTALL)


@dataclass
class Script:
    """What a script came to: its commands in order, with what was exported before."""

    commands: list[list[str]] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_script(text: str, arguments: Sequence[str] = (), variables: dict[str, str] | None = None) -> Script:
    """The commands of `text`, as if it were called with `arguments` (`$@`) and `variables` in the environment."""
    reader = _Reader(list(arguments), variables or {})
    reader.run(tokens_of(text.replace("\r\n", "\n")))
    return reader.script


class _Reader:
    """The state of a script while it is read."""

    def __init__(self, arguments: list[str], variables: dict[str, str]) -> None:
        self.script = Script()
        self.arguments = arguments
        self.given = set(variables)
        self.variables: dict[str, str | list[str]] = {"HOME": "~", "PWD": ".", **variables}
        self.functions: dict[str, list[Token]] = {}
        self.depth = 0

    # -------------------------------------------------------------------------------------------- statements

    def run(self, tokens: list[Token]) -> None:
        """One statement after the other."""
        place = 0
        while place < len(tokens):
            token = tokens[place]
            if token.is_operator:
                place += 1
                continue
            keyword = token.word.plain
            if keyword in ("if", "case", "for", "while", "until", "select"):
                end = _end_of(tokens, place)
                self.compound(keyword, tokens[place + 1 : end])
                place = end + 1
            elif (function := self.function_at(tokens, place)) is not None:
                place = function
            elif keyword in ("{", "}", "!", "then", "do", "done", "fi", "esac"):
                place += 1
            else:
                end = next((i for i in range(place, len(tokens)) if tokens[i].is_operator), len(tokens))
                self.command([token.word for token in tokens[place:end]])
                place = end

    def function_at(self, tokens: list[Token], place: int) -> int | None:
        """Remember a function that is defined here; the place after it, or None if there is none."""
        start = place + (tokens[place].word.plain == "function")
        name = tokens[start].word.plain if start < len(tokens) and not tokens[start].is_operator else None
        if name is None or not re.fullmatch(r"[\w:-]+(\(\))?", name):
            return None
        after = start + 1
        has_parentheses = name.endswith("()")
        while after < len(tokens) and tokens[after].text in ("(", ")"):
            has_parentheses, after = True, after + 1
        while after < len(tokens) and tokens[after].text == "\n":
            after += 1
        opens = after < len(tokens) and not tokens[after].is_operator and tokens[after].word.plain == "{"
        if not opens or not (has_parentheses or start > place):
            return None
        end = _end_of(tokens, after)
        self.functions[name.removesuffix("()")] = tokens[after + 1 : end]
        return end + 1

    def compound(self, keyword: str, inside: list[Token]) -> None:
        if keyword == "if":
            self.branches(inside)
        elif keyword == "case":
            self.cases(inside)
        elif keyword == "for":
            self.first_round(inside)
        else:
            self.remark(f"a `{keyword}` loop is skipped")

    def first_round(self, inside: list[Token]) -> None:
        """The body of `for NAME in WORDS` once, with the first of the words."""
        head, *rest = _split_at(inside, ("do",))
        words = [token.word for token in head[1] if not token.is_operator]
        if not rest or len(words) < 3 or words[1].plain != "in":
            self.remark("a `for` loop is skipped")
            return
        name, values = words[0].plain, [value for word in words[2:] for value in self.expanded(word)]
        if values:
            self.variables[name] = values[0]
            if len(values) > 1:
                self.remark(f"a loop is taken once, with {name}={values[0]} alone of {' '.join(values)}")
            self.run(rest[0][1])

    def branches(self, inside: list[Token]) -> None:
        """The first branch whose condition holds; what can't be decided counts as false."""
        parts = _split_at(inside, ("then", "elif", "else"))
        words = ["if", *(word for word, _ in parts[1:])]
        bodies = [body for _, body in parts]
        for place, word in enumerate(words):
            if word == "else":
                self.run(bodies[place])
                return
            if word == "then":
                continue
            if self.holds(bodies[place]) and place + 1 < len(bodies):
                self.run(bodies[place + 1])
                return

    def holds(self, condition: list[Token]) -> bool:
        """Whether a test holds, of those with `[`, `[[` and `test`."""
        words = [token.text if token.is_operator else " ".join(self.expanded(token.word)) for token in condition]
        shown = " ".join(word for word in words if word.strip(" \n;"))
        first = next((word for word in words if word.strip(" \n;!")), "")
        holds: bool | None = None
        if first in ("[", "[[", "test"):
            words = [word for word in words if word not in ("[", "[[", "test", "]", "]]", "\n", ";")]
            holds = any_of(words)
        if holds is None:
            self.remark(f"the condition `{shown}` is taken as false")
        return bool(holds)

    def cases(self, inside: list[Token]) -> None:
        subject = " ".join(self.expanded(inside[0].word)) if inside and not inside[0].is_operator else ""
        rest = inside[1:]
        while rest and (rest[0].is_operator or rest[0].word.plain == "in"):
            rest = rest[1:]
        while rest:
            close = next((i for i, token in enumerate(rest) if token.text == ")"), None)
            if close is None:
                return
            patterns = [" ".join(self.expanded(token.word)) for token in rest[:close] if not token.is_operator]
            end = next((i for i in range(close, len(rest)) if rest[i].text == ";;"), len(rest))
            if any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns):
                self.run(rest[close + 1 : end])
                return
            rest = rest[end + 1 :]

    # ---------------------------------------------------------------------------------------------- commands

    def command(self, words: list[Word]) -> None:
        """A simple command: assignments, or words to keep."""
        local: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.match(words[0].leading_text)):
            self.assign(match[1], match[2], words[0], local if len(words) > 1 else None)
            words = words[1:]
        if not words:
            return
        flat = [item for word in words for item in self.expanded(word)]
        if not flat:
            return
        if flat[0] in ("export", "declare", "local", "readonly", "typeset"):
            self.export(words[1:], is_export=flat[0] == "export")
        elif flat[0] == "shift":
            self.arguments = self.arguments[int(flat[1]) if len(flat) > 1 and flat[1].isdigit() else 1 :]
        elif flat[0] in self.functions and self.depth < _DEEPEST:
            before, self.arguments, self.depth = self.arguments, flat[1:], self.depth + 1
            self.run(self.functions[flat[0]])
            self.arguments, self.depth = before, self.depth - 1
        else:
            self.script.exports |= {name: value for name, value in local.items() if name not in self.script.exports}
            self.script.commands.append(flat)

    def export(self, words: list[Word], *, is_export: bool) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word.leading_text)
            if match:
                self.assign(match[1], match[2], word, self.script.exports if is_export else None)
            elif is_export and isinstance(value := self.variables.get(word.plain), str):
                self.script.exports[word.plain] = value

    def assign(self, name: str, sign: str, word: Word, exports: dict[str, str] | None) -> None:
        if word.array is not None:
            items = [item for one in word.array for item in self.expanded(one)]
            before = self.variables.get(name, [])
            before = [before] if isinstance(before, str) else before
            self.variables[name] = [*before, *items] if sign == "+=" else items
            return
        value = " ".join(self.expanded(word.after(len(name) + len(sign)), splits=False))
        if name in self.given and "$(" in value:  # who gave it knows what the command would have said
            return
        old = self.variables.get(name, "")
        self.variables[name] = (old if isinstance(old, str) else " ".join(old)) + value if sign == "+=" else value
        if exports is not None:
            exports[name] = str(self.variables[name])

    # -------------------------------------------------------------------------------------------- expansions

    def expanded(self, word: Word, splits: bool = True) -> list[str]:
        """The words that one word of the script becomes: none, one, or several for arrays and unquoted lists."""
        items: list[str] = []
        current: str | None = None
        is_empty_list = False
        for part in word.parts:
            if not part.is_expansion:
                current = (current or "") + part.text
                continue
            values, several = self.value(part.text)
            is_empty_list = is_empty_list or (several and not values)
            if part.is_quoted and not several:
                current = (current or "") + " ".join(values)
                continue
            pieces = values if part.is_quoted else [piece for value in values for piece in value.split()]
            if not splits:
                pieces = [" ".join(values)]
            for place, piece in enumerate(pieces):
                if place and current is not None:
                    items.append(current)
                    current = None
                current = (current or "") + piece
        if current is None or (current == "" and is_empty_list and not items):  # "$@" of nothing is no word
            return items
        return [*items, current]

    def value(self, expression: str) -> tuple[list[str], bool]:
        """What `$expression` stands for, and whether it is a list of words also in quotes."""
        if expression.startswith("(("):
            return [self.arithmetic(expression[2:-2])], False
        if expression.startswith(("(", "`")):
            self.remark(f"`${expression}` is not run, and stands as it is written")
            return [f"${expression}" if expression.startswith("(") else expression], False
        inner = expression[1:-1] if expression.startswith("{") else expression
        if inner.startswith("#") and len(inner) > 1:
            is_list = inner.endswith(("[@]", "[*]"))
            counted = self.look_up(inner[1:-3], "[@]") if is_list else self.look_up(inner[1:], None)
            return [str(len(counted or []) if is_list else len("".join(counted or [])))], False
        match = _EXPANSION.fullmatch(inner)
        if match is None:
            self.remark(f"${expression} is not understood, and stands as it is written")
            return [f"${expression}"], False
        name, index, change = match[1], match[2], match[3]
        values = self.look_up(name, index)
        several = name == "@" or index == "[@]"
        if change:
            return self.changed(name, values, change, several), several
        if values is None:
            if not several:
                self.remark(f"{name} is not set in the script, and is empty (--set {name}=... gives it)")
            return ([] if several else [""]), several
        return values, several

    def look_up(self, name: str, index: str | None) -> list[str] | None:
        """The values of a name; None if it has none."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        if name.isdigit():
            place = int(name)
            return [self.arguments[place - 1]] if 0 < place <= len(self.arguments) else None
        value = self.variables.get(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if index in (None, "[@]", "[*]"):
            return values if index or isinstance(value, str) else values[:1]
        chosen = index[1:-1] if index else "0"
        return [values[int(chosen)]] if chosen.isdigit() and int(chosen) < len(values) else None

    def changed(self, name: str, values: list[str] | None, change: str, several: bool) -> list[str]:
        """`${name<change>}`: a default, an alternative, or a part of the value."""
        is_unset = values is None or (change.startswith(":") and not any(values))
        if part := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", change):
            start, length = int(part[1]), int(part[2]) if part[2] else None
            if name in ("@", "*"):  # counted from $1
                start = max(0, start - 1)
            end = None if length is None else start + length
            is_list = name in ("@", "*") or several
            return (values or [])[start:end] if is_list else [value[start:end] for value in values or [""]]
        rule = change.removeprefix(":")
        if rule[:1] in ("-", "=", "?"):
            if not is_unset:
                return values or [""]
            if rule[0] == "?":
                self.remark(f"{name} must be set: {self.text(rule[1:])} (--set {name}=... gives it)")
                return [""]
            default = self.text(rule[1:])
            if rule[0] == "=":
                self.variables[name] = default
            return [default]
        if rule[:1] == "+":
            return [""] if is_unset else [self.text(rule[1:])]
        return [cut(value, change) for value in values or ([] if several else [""])]

    def text(self, source: str) -> str:
        """The text of a default, which may have expansions and quotes of its own."""
        tokens = tokens_of(source)
        return " ".join(" ".join(self.expanded(token.word, splits=False)) for token in tokens if not token.is_operator)

    def arithmetic(self, source: str) -> str:
        """Whole numbers with + - * / % and brackets; a name is its variable."""
        filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: self.number_text(match[1]), source)
        try:
            return str(computed(filled))
        except ValueError:
            self.remark(f"$(({source})) is not a sum of whole numbers, and stands as it is written")
            return f"$(({source}))"

    def number_text(self, name: str) -> str:
        values = self.look_up(name, None) or ["0"]
        return values[0] or "0"

    def remark(self, text: str) -> None:
        if text not in self.script.remarks:
            self.script.remarks.append(text)


_CLOSING = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done", "{": "}"}


def _end_of(tokens: list[Token], place: int) -> int:
    """Where the statement that begins here ends: the place of its `fi`, `esac`, `done` or `}`."""
    expected: list[str] = []
    at_start = True
    for i in range(place, len(tokens)):
        token = tokens[i]
        word = "" if token.is_operator else (token.word.plain or "")
        if at_start and word in _CLOSING:
            expected.append(_CLOSING[word])
        elif at_start and expected and word == expected[-1]:
            expected.pop()
            if not expected:
                return i
        at_start = token.is_operator or word in ("then", "else", "elif", "do", "{", "!", "in")
    return len(tokens)


def _split_at(tokens: list[Token], words: tuple[str, ...]) -> list[tuple[str, list[Token]]]:
    """The parts of an `if` between its own keywords, each with the keyword that it begins with."""
    parts: list[tuple[str, list[Token]]] = [("", [])]
    place, at_start = 0, True
    while place < len(tokens):
        token = tokens[place]
        word = "" if token.is_operator else (token.word.plain or "")
        if at_start and word in _CLOSING:
            end = min(_end_of(tokens, place), len(tokens) - 1)
            parts[-1][1].extend(tokens[place : end + 1])
            place, at_start = end + 1, True
            continue
        if at_start and word in words:
            parts.append((word, []))
        else:
            parts[-1][1].append(token)
        at_start = token.is_operator or word in words
        place += 1
    return parts
