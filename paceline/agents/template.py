"""The chat template of a run's tokenizer: messages to text, text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from paceline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""`{"role": "user", "content": "..."}`."""


class ChatTemplate:
    """Renders chats as `data.apply_chat_template_kwargs` says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._settings = dict(settings)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text after which the model's next turn begins."""
        if self._tokenizer.chat_template is None and "chat_template" not in self._settings:
            raise DataError(
                "the tokenizer has no chat template, and a conversation of several turns needs one. Use the tokenizer "
                "of an instruction-tuned model (actor_rollout_ref.model.tokenizer_path)."
            )
        given_tools: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                **given_tools,
                add_generation_prompt=True,
                tokenize=False,
                **self._settings,
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template can't write a chat of {roles}: {error}") from error
        assert isinstance(text, str)  # of one chat, and not of its tokens
        return text

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """The tokens of a text that goes on behind the special token `after`, or stands at a beginning."""
        before = "" if after is None else self.decode([after])
        ids = self._tokenizer(before + text, add_special_tokens=False)["input_ids"]
        assert isinstance(ids, list)
        return ids[1:] if after is not None and ids[:1] == [after] else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
