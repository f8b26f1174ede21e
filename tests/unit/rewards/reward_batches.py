"""Batches of responses as a rollout gives them, from texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.protocol import DataProto
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
PROMPT_LENGTH = 30
RESPONSE_LENGTH = 24


def make_batch(
    responses: list[str],
    truths: list[Any],
    sources: list[str] | str | None = "openai/gsm8k",
    prompt: str = "q #### 42",
    style: str = "rule",
    **columns: list[Any],
) -> DataProto:
    """Prompts padded on the left, responses that end with <eos> padded on the right, an empty string without tokens."""

    def ids(text: str) -> list[int]:
        return TOKENIZER(text, add_special_tokens=False)["input_ids"]

    rows = [[*ids(response), TOKENIZER.eos_token_id] if response else [] for response in responses]
    prompt_ids = ids(prompt)
    prompts = torch.tensor([[0] * (PROMPT_LENGTH - len(prompt_ids)) + prompt_ids] * len(rows))
    response_ids = torch.tensor([row + [0] * (RESPONSE_LENGTH - len(row)) for row in rows])
    mask = torch.tensor(
        [
            [0] * (PROMPT_LENGTH - len(prompt_ids))
            + [1] * (len(prompt_ids) + len(row))
            + [0] * (RESPONSE_LENGTH - len(row))
            for row in rows
        ]
    )
    non_tensors: dict[str, Any] = {
        "reward_model": [{"style": style, "ground_truth": truth} for truth in truths],
        **columns,
    }
    if sources is not None:
        non_tensors["data_source"] = [sources] * len(rows) if isinstance(sources, str) else sources
    arrays = {}
    for key, values in non_tensors.items():
        arrays[key] = np.empty(len(values), dtype=object)
        arrays[key][:] = values
    return DataProto.from_dict({"prompts": prompts, "responses": response_ids, "attention_mask": mask}, arrays)
