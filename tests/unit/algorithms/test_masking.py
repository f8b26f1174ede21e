from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given

from paceline.algorithms.masking import masked_mean, masked_sum, masked_whiten
from tests.unit.algorithms.algorithm_cases import QUICK, assert_equal, batches, tensor


def _valid(x: torch.Tensor, mask: torch.Tensor) -> list[float]:
    rows = zip(x.tolist(), mask.tolist(), strict=True)
    return [entry for row, bits in rows for entry, bit in zip(row, bits, strict=True) if bit]


@QUICK
@given(batch=batches())
def test_sum_and_mean_are_those_of_the_valid_entries(batch) -> None:
    x = batch["values"]
    valid = _valid(x, batch.mask)
    assert_equal(masked_sum(x, batch.mask), sum(valid))
    assert_equal(masked_mean(x, batch.mask), statistics.mean(valid) if valid else 0.0)


@QUICK
@given(batch=batches())
def test_sum_and_mean_along_a_dimension_are_those_of_each_row(batch) -> None:
    x = batch["values"]
    rows = [_valid(x[row : row + 1], batch.mask[row : row + 1]) for row in range(len(x))]
    assert_equal(masked_sum(x, batch.mask, dim=-1), [sum(row) for row in rows])
    assert_equal(masked_mean(x, batch.mask, dim=-1), [statistics.mean(row) if row else 0.0 for row in rows])


@QUICK
@given(batch=batches())
def test_whitening_is_the_formula_applied_to_each_valid_entry(batch) -> None:
    x = batch["values"]
    valid = _valid(x, batch.mask)
    if not valid:
        return
    mean = statistics.mean(valid)
    scale = ((statistics.variance(valid) if len(valid) > 1 else 0.0) + 1e-8) ** -0.5
    expected = [
        [(entry - mean) * scale if bit else 0.0 for entry, bit in zip(row, bits, strict=True)]
        for row, bits in zip(x.tolist(), batch.mask.tolist(), strict=True)
    ]
    assert_equal(masked_whiten(x, batch.mask), expected)


def test_hand_computed_numbers() -> None:
    x = tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # Valid: 1, 2, 6. Sum 9, mean 3, squared deviations 4 + 1 + 9 = 14, variance 14 / (3 - 1) = 7.
    assert masked_sum(x, mask).item() == 9.0
    assert masked_mean(x, mask).item() == 3.0
    assert masked_mean(x, mask, dim=-1).tolist() == [1.5, 6.0]
    # (1 - 3) / sqrt(7) = -0.755929, (2 - 3) / sqrt(7) = -0.377964, (6 - 3) / sqrt(7) = 1.133893
    expected = tensor([[-0.755929, -0.377964, 0.0], [1.133893, 0.0, 0.0]])
    torch.testing.assert_close(masked_whiten(x, mask), expected, rtol=1e-5, atol=1e-6)


def test_a_single_valid_entry_whitens_to_zero_and_not_to_nan() -> None:
    x, mask = tensor([[5.0, 3.0]]), torch.tensor([[1, 0]])
    assert masked_whiten(x, mask).tolist() == [[0.0, 0.0]]


def test_equal_entries_whiten_to_zero_although_their_mean_is_rounded() -> None:
    x = torch.full((3, 7), 100.1)
    mask = torch.ones_like(x)
    assert masked_whiten(x, mask).abs().max().item() < 1e-6


def test_a_mask_of_another_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(2, 3\)"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 1))
