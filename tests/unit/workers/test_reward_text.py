"""What a reward model gets to read: the sampled tokens, or the text in its own tokens."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.workers.reward_text import JudgedText
from tests.tiny import make_tiny_tokenizer

POLICY = make_tiny_tokenizer()


def make_judge(template: str | None):
    judge = make_tiny_tokenizer()
    judge.chat_template = template
    judge.add_tokens(["<extra>"])  # another vocabulary
    return judge


def make_batch(raw_prompt: list | None) -> DataProto:
    """One row: the prompt "2+2=", padded on the left, and the response "4", padded on the right."""
    prompt, response = POLICY("2+2=")["input_ids"], POLICY("4")["input_ids"]
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, *prompt, *response, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0]]),
            "responses": torch.tensor([[*response, 0]]),
            "response_mask": torch.tensor([[1, 0]]),
        },
        {} if raw_prompt is None else {"raw_prompt": raw_prompt},
    )


def test_shared_tokens_are_read_as_they_were_sampled() -> None:
    columns = JudgedText(POLICY, make_tiny_tokenizer())(make_batch(None))
    assert POLICY.decode(columns["input_ids"][0]) == "2+2=4"
    assert columns["attention_mask"].tolist() == [[1] * 5]
    assert columns["position_ids"].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("raw_prompt", "text"),
    [("2+2=", "2+2=4"), ([{"role": "user", "content": "2+2="}], "[user]2+2=[assistant]4")],
)
def test_a_model_with_other_tokens_reads_the_text(raw_prompt: str | list, text: str) -> None:
    judge = make_judge("{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}")
    prompts = [raw_prompt]
    assert judge.decode(JudgedText(POLICY, judge)(make_batch(prompts))["input_ids"][0]) == text
    assert judge.decode(JudgedText(POLICY, judge, max_length=2)(make_batch(prompts))["input_ids"][0]) == text[-2:]


def test_what_can_not_be_rewritten_is_an_error() -> None:
    with pytest.raises(DataError, match="the batch has no column raw_prompt"):
        JudgedText(POLICY, make_judge("{{ messages }}"))(make_batch(None))
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        JudgedText(POLICY, make_judge(None))(make_batch([[{"role": "user", "content": "2+2="}]]))
