"""Micro-batches: rows that go through the model together, without the columns that none of them uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict


def split_micro_batches(batch: TensorDict, micro_batch_size: int) -> list[TensorDict]:
    """The rows of `batch` in order, `micro_batch_size` at a time; the last part may be smaller."""
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; set it to 1 or more.")
    if len(batch) == 0:
        raise ValueError("the batch has no rows; give every rank at least one.")
    return list(batch.split(micro_batch_size, dim=0))


@dataclass(frozen=True)
class Window:
    """Columns [left, right) of `input_ids` that matter to a micro-batch; what lies outside is padding of every row."""

    left: int
    right: int

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> Window:
        """The columns that at least one row attends to; of a batch that attends to nothing, the first column."""
        used = attention_mask.any(dim=0).nonzero()
        if len(used) == 0:
            return cls(0, 1)
        return cls(int(used[0]), int(used[-1]) + 1)

    @classmethod
    def of_responses(cls, attention_mask: torch.Tensor, num_response_columns: int) -> Window:
        """As `of`, but at least the last prompt column, which predicts the first token, and one response column."""
        window = cls.of(attention_mask)
        first_response = attention_mask.shape[-1] - num_response_columns
        return cls(min(window.left, first_response - 1), max(window.right, first_response + 1))
