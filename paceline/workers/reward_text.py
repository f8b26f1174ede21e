"""Inputs of a reward model: the policy's own tokens, or the same chat in the reward model's template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.workers.agent_rows import CHAT

logger = logging.getLogger(__name__)


def share_tokens(policy: PreTrainedTokenizerBase, judge: PreTrainedTokenizerBase) -> bool:
    """Whether the judge reads the policy's tokens as they are: same vocabulary, no other chat template."""
    return policy.get_vocab() == judge.get_vocab() and judge.chat_template in (None, policy.chat_template)


class JudgedText:
    """Prompts and responses as inputs of a reward model (the judge).

    If policy and judge share tokens, the sampled tokens themselves. Else the text is tokenized again: a chat
    (`raw_prompt`) gets the response as the assistant's turn and goes through the judge's template; a prompt that is a
    string is followed by the response; a conversation of several turns (`conversation_chat`) is whole already. What has
    more than `max_length` tokens loses its beginning.
    """

    def __init__(
        self, policy: PreTrainedTokenizerBase, judge: PreTrainedTokenizerBase, max_length: int | None = None
    ) -> None:
        self.policy = policy
        self.judge = judge
        self.max_length = max_length
        self.rewrites = not share_tokens(policy, judge)

    def __call__(self, data: DataProto) -> TensorDict:
        """Columns `input_ids`, `attention_mask`, `position_ids` (batch, tokens), padded on the left."""
        tokens = self._rewritten(data) if self.rewrites else _valid(data, "input_ids", "attention_mask")
        tokens = self._cut(tokens)
        width = max(len(ids) for ids in tokens)
        input_ids = torch.full((len(tokens), width), self.judge.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(tokens):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            attention_mask[row, width - len(ids) :] = 1
        columns = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        }
        return TensorDict(columns, batch_size=[len(tokens)])

    def _rewritten(self, data: DataProto) -> list[list[int]]:
        if CHAT in data.non_tensor_batch:
            return [self._tokens_of(self._without_special(chat)) for chat in data.non_tensor_batch[CHAT]]
        responses = self.policy.batch_decode(_valid(data, "responses", "response_mask"), skip_special_tokens=True)
        prompts = data.non_tensor_batch.get("raw_prompt")
        if prompts is None:
            raise DataError(
                "The reward model has another tokenizer or chat template than the policy and must read the chat "
                "itself, but the batch has no column raw_prompt. Add it to the rows of your dataset."
            )
        return [self._tokens(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def _without_special(self, chat: Any) -> Any:
        """What the model said without the policy's special tokens, as a response is read."""
        if isinstance(chat, str):
            return _removed(chat, self.policy.all_special_tokens)
        return [
            {**message, "content": _removed(message["content"], self.policy.all_special_tokens)}
            if message.get("role") == "assistant"
            else message
            for message in chat
        ]

    def _tokens(self, prompt: Any, response: str) -> list[int]:
        if isinstance(prompt, str):
            return self._tokens_of(prompt + response)
        return self._tokens_of([*prompt, {"role": "assistant", "content": response}])

    def _tokens_of(self, chat: Any) -> list[int]:
        if isinstance(chat, str):
            return self.judge(chat)["input_ids"]
        if self.judge.chat_template is None:
            raise DataError(
                "Prompts are chats, and the reward model's tokenizer has no chat template. Set "
                "reward_model.model.tokenizer_path to one that has, or give prompts as strings."
            )
        try:
            text = self.judge.apply_chat_template(chat, tokenize=False)
        except TemplateError as error:
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in chat))
            raise DataError(
                f"the reward model's chat template can't write a chat of {roles}: {error}. Set "
                "reward_model.model.tokenizer_path to a tokenizer whose template can."
            ) from error
        return self.judge(text, add_special_tokens=False)["input_ids"]  # the template wrote them

    def _cut(self, tokens: list[list[int]]) -> list[list[int]]:
        limit = self.max_length
        if limit is None:
            return tokens
        too_long = sum(len(ids) > limit for ids in tokens)
        if too_long:
            logger.warning(
                "%d of %d texts are longer than the reward model reads (%d tokens): it sees their ends",
                too_long, len(tokens), limit,
            )  # fmt: skip
        return [ids[-limit:] for ids in tokens]


def _valid(data: DataProto, column: str, mask: str) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(data.batch[column], data.batch[mask], strict=True)]


def _removed(text: str, parts: Sequence[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text
