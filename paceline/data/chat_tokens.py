"""Conversations as token ids, with a mask of those that are trained: the turns of the assistant.

Where the chat template marks what is generated (`{% generation %}`), its marks are the mask. Else a turn is what the
template adds behind the prompt that a rollout would be given; that it only adds is checked for every turn. Prompt and
turn are tokenised apart, as in a rollout, so a model is trained on the very tokens that it will see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from paceline.errors import DataError
from paceline.text import shorten

Messages = list[dict[str, Any]]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TrainedTokens(NamedTuple):
    """A text as tokens; `trained` is 1 on those whose prediction is trained. It ends with one of these."""

    ids: list[int]
    trained: list[int]


@dataclass(frozen=True)
class TrainedConversation:
    """A text to train on: messages, or a plain prompt with its reply."""

    messages: Messages | None = None
    prompt: str = ""
    reply: str = ""
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are trained."""


class _Segment(NamedTuple):
    text: str
    trained: bool
    is_start: bool
    """Whether the tokenizer adds its own special tokens, as to a plain string."""


class ConversationTokens:
    """Tokenises conversations by a tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs
        template = tokenizer.chat_template
        self.has_marks = isinstance(template, str) and _MARK.search(template) is not None

    def tokenise(self, conversations: Sequence[TrainedConversation]) -> Iterator[TrainedTokens]:
        """The tokens of each. Raises DataError whose text goes on after the name of a row."""
        by_marks = {
            number: self._by_marks(one)
            for number, one in enumerate(conversations)
            if one.messages is not None and self.has_marks
        }
        segments = {
            number: list(self._segments(one)) for number, one in enumerate(conversations) if number not in by_marks
        }
        ids = self._encode([segment for parts in segments.values() for segment in parts])
        for number, one in enumerate(conversations):
            if number in by_marks:
                yield _ending_trained(*by_marks[number])
                continue
            parts = [(next(ids), segment.trained) for segment in segments[number]]
            if one.messages is None:
                parts.append(([self.tokenizer.eos_token_id], True))
            else:
                parts = [piece for part in parts for piece in self._until_end(*part)]
            trained = [int(is_trained) for tokens, is_trained in parts for _ in tokens]
            yield _ending_trained([token for tokens, _ in parts for token in tokens], trained)

    def _encode(self, segments: Sequence[_Segment]) -> Iterator[list[int]]:
        encoded: dict[tuple[str, bool], list[int]] = {}
        for is_start in (True, False):
            texts = list({segment.text for segment in segments if segment.is_start is is_start})
            if texts:
                tokens = self.tokenizer(texts, add_special_tokens=is_start)["input_ids"]
                encoded |= {(text, is_start): ids for text, ids in zip(texts, tokens, strict=True)}
        return (encoded[segment.text, segment.is_start] for segment in segments)

    def _until_end(self, tokens: list[int], trained: bool) -> Iterator[tuple[list[int], bool]]:
        """What a template writes after the token that ends a turn, such as a line feed, is not the model's."""
        end = self.tokenizer.eos_token_id
        if not trained or end not in tokens:
            yield tokens, trained
            return
        count = len(tokens) - tokens[::-1].index(end)
        yield tokens[:count], True
        yield tokens[count:], False

    def _segments(self, one: TrainedConversation) -> Iterator[_Segment]:
        if one.messages is None:
            yield _Segment(one.prompt, False, is_start=True)
            yield _Segment(one.reply, True, is_start=False)
            return
        messages = one.messages
        whole, at = self._render(messages), 0
        for turn in _trained_turns(one):
            opened = self._render(messages[:turn], add_generation_prompt=True) if turn else ""
            closed = self._render(messages[: turn + 1])
            if not (whole.startswith(opened) and whole.startswith(closed) and at <= len(opened) < len(closed)):
                raise DataError(
                    f"has a turn of the assistant (message {turn}) that the chat template does not write behind what "
                    f"comes before it: {shorten(opened[-60:])!r} is the prompt for it, and {shorten(whole[at:])!r} the "
                    "text with it. Train on data.trained_turns=last, set data.apply_chat_template_kwargs, or give the "
                    "template {% generation %} marks around what the assistant says."
                )
            yield _Segment(whole[at : len(opened)], False, is_start=False)
            yield _Segment(whole[len(opened) : len(closed)], True, is_start=False)
            at = len(closed)

    def _by_marks(self, one: TrainedConversation) -> tuple[list[int], list[int]]:
        assert one.messages is not None
        _trained_turns(one)  # there must be one
        encoded = self._apply(one.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if one.turns == "last" and 1 in mask:
            last = len(mask) - mask[::-1].index(1)
            first = last - next((count for count, bit in enumerate(mask[:last][::-1]) if not bit), last)
            mask = [bit if first <= place < last else 0 for place, bit in enumerate(mask)]
        return ids, mask

    def _render(self, messages: Messages, **options: Any) -> str:
        return str(self._apply(messages, tokenize=False, **options))

    def _apply(self, messages: Messages, **options: Any) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "is a chat, but the tokenizer has no chat template. Use the tokenizer of an instruction-tuned model "
                "(model.tokenizer_path), or give prompts and replies as strings."
            )
        try:
            return self.tokenizer.apply_chat_template(messages, **{**self._kwargs, **options})
        except Exception as error:  # a template raises what it likes, such as for roles that do not alternate
            raise DataError(f"is rejected by the chat template: {error}") from error


def _trained_turns(one: TrainedConversation) -> list[int]:
    turns = [number for number, message in enumerate(one.messages or []) if message["role"] == "assistant"]
    if not turns:
        raise DataError("has no turn of the assistant, so there is nothing to train on. Remove it.")
    return turns if one.turns == "all" else turns[-1:]


def _ending_trained(ids: list[int], trained: list[int]) -> TrainedTokens:
    """Without what follows the last trained token, which trains nothing. The first token is predicted from nothing."""
    trained = [0, *trained[1:]]
    end = max((place + 1 for place, bit in enumerate(trained) if bit), default=0)
    return TrainedTokens(ids[:end], trained[:end])
