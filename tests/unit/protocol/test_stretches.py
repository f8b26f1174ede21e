"""Columns of few stretches: the same bits come back, in few bytes, and others are left as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol.stretches import pack, repeated_rows

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float64]
few = settings(max_examples=40, deadline=None)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@few
@given(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(8, 40), st.integers(0, 2**32))
def test_what_was_packed_comes_back_to_the_last_bit(dtype, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, width * dtype.itemsize), generator=generator, dtype=torch.uint8)
    column = (raw % 2).bool()[:, :width] if dtype is torch.bool else raw.view(dtype)
    found = pack(column, largest_share=1000.0)
    assert bits(found.unpack()) == bits(column)
    assert found.unpack().dtype == dtype
    chosen = np.random.default_rng(seed).integers(0, rows, 2 * rows)
    assert bits(found.take(chosen).unpack()) == bits(column[chosen])


def test_nan_infinity_and_the_sign_of_zero_stay():
    column = torch.zeros(3, 9)
    column[0, 2], column[1, 0], column[2, 8] = float("nan"), -0.0, float("-inf")
    assert bits(pack(column, 10.0).unpack()) == bits(column)


@pytest.mark.parametrize("name", ["mask", "places", "score"])
def test_masks_places_and_one_score_a_row_take_a_hundredth(name):
    lengths = torch.arange(100, 164)[:, None]
    mask = (torch.arange(1024) < lengths).long()
    columns = {"mask": mask, "places": (mask.cumsum(1) - 1).clamp(min=0), "score": torch.zeros(64, 1024)}
    columns["score"][torch.arange(64), lengths[:, 0] - 1] = torch.rand(64)
    assert pack(columns[name], 1 / 16).nbytes < columns[name].nbytes / 100


def test_a_column_that_would_not_be_small_is_not_packed():
    numbers = torch.randn(50, 64)
    assert pack(numbers, 1 / 2) is None
    numbers[::13] = 0  # the few rows that are tried first
    assert pack(numbers, 1 / 2) is None
    assert pack(torch.zeros(50), 1.0) is None
    assert pack(torch.zeros(50, 2, 9), 1.0) is None


def test_rows_that_repeat_the_one_before_are_found():
    column = torch.arange(12).view(3, 4).repeat_interleave(3, dim=0)
    assert repeated_rows(column).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert repeated_rows(torch.arange(12).view(3, 4)) is None
    assert repeated_rows(torch.tensor([[0.0], [-0.0], [0.0]])) is None  # equal numbers of other bits
