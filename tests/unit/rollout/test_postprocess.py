"""Columns to token lists and back."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import Completion

PAD = 0
COMPLETIONS = [Completion([21, 22, 1], [-0.5, -1.0, -1.5], True), Completion([31], [-2.0], False)]


def two_prompts() -> DataProto:
    # The padding token may occur inside a prompt: the mask decides, not the token.
    attention_mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[PAD, PAD, 11, 12], [13, PAD, 15, 16]]),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        }
    )


def test_prompts_lose_their_padding_only() -> None:
    assert prompt_token_lists(two_prompts()) == [[11, 12], [13, PAD, 15, 16]]


def test_columns_of_prompts_and_responses() -> None:
    batch = to_batch(two_prompts(), COMPLETIONS, response_length=4, pad_token_id=PAD).batch
    columns = {name: column.tolist() for name, column in batch.items()}
    assert columns == {
        "prompts": [[PAD, PAD, 11, 12], [13, PAD, 15, 16]],
        "responses": [[21, 22, 1, PAD], [31, PAD, PAD, PAD]],
        "input_ids": [[PAD, PAD, 11, 12, 21, 22, 1, PAD], [13, PAD, 15, 16, 31, PAD, PAD, PAD]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 4, 4, 4]],
        "response_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "rollout_log_probs": [[-0.5, -1.0, -1.5, 0.0], [-2.0, 0.0, 0.0, 0.0]],
    }
    assert {batch[name].dtype for name in columns if name != "rollout_log_probs"} == {torch.int64}
    assert batch["rollout_log_probs"].dtype == torch.float32


def test_prompt_columns_are_not_written_to() -> None:
    prompts = two_prompts()
    before = {name: column.clone() for name, column in prompts.batch.items()}
    to_batch(prompts, COMPLETIONS, response_length=4, pad_token_id=PAD)
    assert all(torch.equal(prompts.batch[name], column) for name, column in before.items())


def test_eos_that_is_the_padding_token_stays_in_the_response_mask() -> None:
    completions = [Completion([21, PAD], [-0.5, -0.5], True), Completion([PAD], [-0.1], True)]
    batch = to_batch(two_prompts(), completions, response_length=3, pad_token_id=PAD).batch
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_number_of_completions_must_fit() -> None:
    with pytest.raises(DataError, match="2 prompts and 1 completions"):
        to_batch(two_prompts(), COMPLETIONS[:1], response_length=4, pad_token_id=PAD)


def test_response_beyond_the_length_is_refused() -> None:
    with pytest.raises(DataError, match="response 0 has 3 tokens, more than the response length 2"):
        to_batch(two_prompts(), COMPLETIONS, response_length=2, pad_token_id=PAD)
