"""Batches in which every cell says its row, so that a test sees where each row went."""

from __future__ import annotations

import numpy as np
import torch

from paceline.protocol import DataProto


def make(rows: int, start: int = 0, **meta) -> DataProto:
    """A batch in which every cell says its row."""
    numbers = torch.arange(start, start + rows)
    return DataProto.from_dict(
        tensors={
            "ids": numbers[:, None] * 10 + torch.arange(3),
            "scores": numbers.to(torch.bfloat16),
            "mask": numbers % 2 == 0,
        },
        non_tensors={
            "uid": [f"row{n}" for n in numbers.tolist()],
            "extra": [{"n": n, "options": [n] * 2} for n in numbers.tolist()],
            "weight": numbers.numpy().astype(np.float32),
        },
        meta_info=meta,
    )


def row_numbers(data: DataProto) -> list[int]:
    """The rows that a `make` batch holds, after a check that all its columns agree."""
    numbers = (data.batch["ids"][:, 0] // 10).tolist()
    assert data.batch["ids"].tolist() == [[n * 10, n * 10 + 1, n * 10 + 2] for n in numbers]
    assert data.batch["scores"].dtype == torch.bfloat16
    assert data.batch["scores"].tolist() == numbers
    assert data.batch["mask"].tolist() == [n % 2 == 0 for n in numbers]
    assert data.non_tensor_batch["uid"].tolist() == [f"row{n}" for n in numbers]
    assert [cell["n"] for cell in data.non_tensor_batch["extra"]] == numbers
    assert data.non_tensor_batch["weight"].tolist() == numbers
    assert len(data) == len(numbers)
    return numbers


def memory(data: DataProto) -> list[int]:
    return [tensor.data_ptr() for tensor in data.batch.values()]
