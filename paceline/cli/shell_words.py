"""A shell script as words and operators: quotes, continuations, comments and arrays; nothing is expanded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPERATORS = ("&&", "||", ";;", "\n", ";", "|", "&", "(", ")")
_BREAKS = " \t\n;|&()<>"


@dataclass(frozen=True)
class ShellPart:
    """A piece of a word: text, or what follows a `$` (also a whole `` `command` ``)."""

    text: str
    is_expansion: bool = False
    is_quoted: bool = False


@dataclass
class Word:
    """One word of a script."""

    parts: list[ShellPart] = field(default_factory=list)
    array: list[Word] | None = None
    """The words of `NAME=( ... )`."""

    @property
    def plain(self) -> str:
        """Its text if it has neither quotes nor expansions, else nothing."""
        return "" if any(part.is_expansion or part.is_quoted for part in self.parts) else self.leading_text

    @property
    def leading_text(self) -> str:
        """The unquoted text that it begins with."""
        text = ""
        for part in self.parts:
            if part.is_expansion or part.is_quoted:
                break
            text += part.text
        return text

    def after(self, count: int) -> Word:
        """The word without its first `count` characters, which are text."""
        parts = list(self.parts)
        while count and parts:
            text = parts[0].text
            if len(text) > count:
                parts[0] = ShellPart(text[count:], is_quoted=parts[0].is_quoted)
                break
            count -= len(text)
            parts = parts[1:]
        return Word(parts)


@dataclass(frozen=True)
class Token:
    """A word, or an operator such as a line's end."""

    word: Word = field(default_factory=Word)
    text: str = ""
    """Of an operator."""

    @property
    def is_operator(self) -> bool:
        return self.text != ""


def tokens_of(text: str) -> list[Token]:
    """The words and operators of a script. What is not closed at the end is taken as closed there."""
    return _Lexer(text).tokens()


class _Lexer:
    """Reads from left to right; a backslash at the end of a line is a character of its own, \\x00, till then."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\\\n", "\x00")
        self.place = 0

    def tokens(self, closing: str = "") -> list[Token]:
        """All tokens up to the end, or to `closing`."""
        found: list[Token] = []
        while self.place < len(self.text):
            rest = self.text[self.place]
            if rest in " \t\x00":
                self.place += 1
            elif rest == "#":
                self.skip_comment()
            elif closing and rest == closing:
                self.place += 1
                return found
            elif rest in "<>" or (rest.isdigit() and self.text[self.place + 1 : self.place + 2] in ("<", ">")):
                self.skip_redirection()
            elif operator := self.operator():
                found.append(Token(text=operator))
            else:
                found.append(Token(self.word()))
        return found

    def operator(self) -> str:
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.place):
                self.place += len(operator)
                return operator
        return ""

    def skip_comment(self) -> None:
        end = self.text.find("\n", self.place)
        # A backslash at the end of a comment continues nothing.
        joined = self.text.find("\x00", self.place)
        ends = [place for place in (end, joined) if place >= 0]
        self.place = min(ends) if ends else len(self.text)
        if self.place == joined:
            self.text = f"{self.text[: self.place]}\n{self.text[self.place + 1 :]}"

    def skip_redirection(self) -> None:
        """`> file`, `2>&1`, `<<EOF ... EOF`: not part of a command's words."""
        while self.place < len(self.text) and self.text[self.place] in "0123456789<>&":
            self.place += 1
        start = self.text[max(0, self.place - 3) : self.place]
        while self.place < len(self.text) and self.text[self.place] in " \t\x00-":
            self.place += 1
        is_number = self.text[self.place - 1 : self.place].isdigit()
        target = "" if is_number else self.word_text()
        if start.endswith("<<") and target:
            line_end = self.text.find("\n", self.place)
            end = re.compile(rf"^\t*{re.escape(target)}$", re.MULTILINE).search(self.text, max(line_end, self.place))
            self.place = len(self.text) if end is None else end.end()

    def word_text(self) -> str:
        return "".join(part.text for part in self.word().parts)

    def word(self) -> Word:
        word = Word()
        while self.place < len(self.text):
            sign = self.text[self.place]
            if sign == "\x00":  # a line that goes on: nothing stands between its parts
                self.place += 1
                continue
            if sign in _BREAKS:
                if sign == "(" and word.plain.endswith("="):
                    self.place += 1
                    word.array = [token.word for token in self.tokens(")") if not token.is_operator]
                break
            word.parts += self.part(sign)
        return word

    def part(self, sign: str) -> list[ShellPart]:
        """The next piece of a word, or several of a text in double quotes."""
        if sign == "'":
            return [ShellPart(self.up_to("'"), is_quoted=True)]
        if sign == '"':
            self.place += 1
            return self.double_quoted()
        if sign == "\\":
            self.place += 2
            return [ShellPart(self.text[self.place - 1 : self.place], is_quoted=True)]
        if sign in "$`":
            return [self.expansion(is_quoted=False)]
        self.place += 1
        return [ShellPart(sign)]

    def up_to(self, closing: str) -> str:
        """The text from the next character to `closing`, which is passed."""
        end = self.text.find(closing, self.place + 1)
        end = len(self.text) if end < 0 else end
        inside = self.text[self.place + 1 : end]
        self.place = end + 1
        return inside.replace("\x00", "\\\n")

    def double_quoted(self) -> list[ShellPart]:
        parts = [ShellPart("", is_quoted=True)]  # also "" is a word
        while self.place < len(self.text) and self.text[self.place] != '"':
            sign = self.text[self.place]
            if sign in "$`":
                parts.append(self.expansion(is_quoted=True))
            elif sign == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`"):
                parts.append(ShellPart(self.text[self.place + 1], is_quoted=True))
                self.place += 2
            else:
                parts.append(ShellPart("" if sign == "\x00" else sign, is_quoted=True))
                self.place += 1
        self.place += 1
        return parts

    def expansion(self, *, is_quoted: bool) -> ShellPart:
        """What begins with `$` or a backquote here, without the `$`."""
        if self.text[self.place] == "`":
            return ShellPart(f"`{self.up_to('`')}`", is_expansion=True, is_quoted=is_quoted)
        self.place += 1
        following = self.text[self.place : self.place + 1]
        if following == "'" and not is_quoted:
            return ShellPart(self.up_to("'"), is_quoted=True)
        if following and following in "{(":
            inside = self.bracketed(following, "}" if following == "{" else ")")
            return ShellPart(inside, is_expansion=True, is_quoted=is_quoted)
        if following.isdigit() or (following and following in "@*#?$!"):
            self.place += 1
            return ShellPart(following, is_expansion=True, is_quoted=is_quoted)
        start = self.place
        while self.place < len(self.text) and (self.text[self.place].isalnum() or self.text[self.place] == "_"):
            self.place += 1
        name = self.text[start : self.place]
        return ShellPart(name, is_expansion=True, is_quoted=is_quoted) if name else ShellPart("$", is_quoted=is_quoted)

    def bracketed(self, opening: str, closing: str) -> str:
        """The text from an opening bracket to the one that closes it, both included; quotes inside hide brackets."""
        start, depth = self.place, 0
        while self.place < len(self.text):
            sign = self.text[self.place]
            if sign == "\\":
                self.place += 1
            elif sign == "'" and opening == "(":
                self.place = (
                    self.text.find("'", self.place + 1) if "'" in self.text[self.place + 1 :] else len(self.text)
                )
            elif sign == opening:
                depth += 1
            elif sign == closing:
                depth -= 1
                if depth == 0:
                    self.place += 1
                    break
            self.place += 1
        return self.text[start : self.place].replace("\x00", " ")
