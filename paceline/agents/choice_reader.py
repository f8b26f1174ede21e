"""One answer of the model while it is sampled: its text as far as that is sure, and where a stop text ends it.

reader = ChoiceReader(template.decode, stop=["\\n\\n"])
reader(17, -0.2)        # a token came; True: a stop text is complete, and no more is wanted
reader.take()           # (new text, its tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNFINISHED = "\ufffd"
"""What a tokenizer writes for a character of which some bytes are missing."""


@dataclass(frozen=True)
class SampledToken:
    """A token as clients see it."""

    text: str
    log_prob: float


class ChoiceReader:
    """Takes tokens as they come. Text is shown when nothing that follows can change or take it back: a character with
    all of its bytes, no beginning of a stop text, and nothing from the `opening` of a tool call on (None: no tools)."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        opening: str | None = None,
        when_new: Callable[[], None] = lambda: None,
    ) -> None:
        self._decode = decode
        self._stop = list(stop)
        self._opening = opening
        self._when_new = when_new
        self._token_ids: list[int] = []
        self._tokens: list[SampledToken] = []
        self._read = (0, 0)
        """Tokens from the first number on are decoded together; those before the second are in the text."""
        self._num_shown = 0
        self._num_tokens_shown = 0
        self.text = ""
        """Of all tokens but the end-of-sequence token; without the stop text, and what is behind it."""
        self.finished_by_eos = self.is_stopped = self.has_ended = False

    def __call__(self, token_id: int, log_prob: float) -> bool:
        """A token that is not the end of the sequence. True if a stop text is there: then it is the last one."""
        self._token_ids.append(token_id)
        self._tokens.append(SampledToken(self._decode([token_id]), log_prob))
        first, read = self._read
        before, now = (self._decode(self._token_ids[first:stop]) for stop in (read, None))
        if len(now) > len(before) and not now.endswith(UNFINISHED):
            longest = max(map(len, self._stop), default=0)
            start = max(0, len(self.text) - longest)
            self.text += now[len(before) :]
            self._read = (read, len(self._token_ids))
            places = [place for stop in self._stop if (place := self.text.find(stop, start)) >= 0]
            if places:
                self.text, self.is_stopped = self.text[: min(places)], True
        self._when_new()
        return self.is_stopped

    def end(self, *, last: tuple[int, float] | None = None) -> None:
        """No more comes; `last` is the end-of-sequence token with its log-prob, if that was sampled."""
        if last is not None:
            self.finished_by_eos = True
            self._tokens.append(SampledToken(self._decode([last[0]]), last[1]))
        if not self.is_stopped:
            first, read = self._read
            self.text += self._decode(self._token_ids[first:])[len(self._decode(self._token_ids[first:read])) :]
        self.has_ended = True
        self._when_new()

    @property
    def tokens(self) -> list[SampledToken]:
        """All that were sampled."""
        return list(self._tokens)

    @property
    def content(self) -> str:
        """The text before the first tool call."""
        return self.text if self._opening is None else self.text.partition(self._opening)[0] if self._opening else ""

    def take(self) -> tuple[str, list[SampledToken]]:
        """What can be shown since the last time, and the tokens that came."""
        sure = self._num_sure
        text, self._num_shown = self.text[self._num_shown : sure], max(sure, self._num_shown)
        tokens = self._tokens[self._num_tokens_shown :] if text or self.has_ended else []
        self._num_tokens_shown += len(tokens)
        return text, tokens

    @property
    def _num_sure(self) -> int:
        """Characters that stay, whatever comes."""
        if self._opening == "":
            return 0
        marks = [] if self._opening is None else [self._opening]
        if marks and (place := self.text.find(marks[0])) >= 0:
            return place
        if self.has_ended or self.is_stopped:
            return len(self.text)
        return len(self.text) - max((_overlap(self.text, mark) for mark in [*self._stop, *marks]), default=0)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark.

    >>> _overlap("so <to", "<tool_call>")
    3
    """
    return next((count for count in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:count])), 0)
