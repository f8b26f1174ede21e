from __future__ import annotations

import pytest
import torch
from hypothesis import given

from paceline.algorithms.value_loss import clipped_value_loss
from tests.unit.algorithms.algorithm_cases import QUICK, assert_equal, batches, sum_all, tensor


@QUICK
@given(batch=batches())
def test_the_loss_and_its_metric_equal_the_slow_version(batch) -> None:
    clip = 0.5
    expected_loss, expected_clipped = 0.0, 0
    for row, t in batch.mask.nonzero().tolist():
        value, old, target = (batch[name][row, t].item() for name in ("values", "old_values", "returns"))
        held = min(max(value, old - clip), old + clip)
        expected_loss += max((value - target) ** 2, (held - target) ** 2) / 2
        expected_clipped += (held - target) ** 2 > (value - target) ** 2
    loss, sums = clipped_value_loss(
        batch["values"], batch["old_values"], batch["returns"], batch.mask, agg=sum_all, cliprange_value=clip
    )
    assert_equal(loss, expected_loss)
    assert sums["vf_clipfrac"].item() == expected_clipped


def test_each_side_of_the_clip_hand_computed() -> None:
    # Old value 0, clip range 0.5. The tokens, left to right:
    #   V = 0.25, return 1:  inside,                           0.5 * 0.75^2  = 0.28125, gradient V - return = -0.75
    #   V = 0.75, return 1:  nearer than the held value 0.5:   0.5 * 0.5^2   = 0.125,   gradient 0
    #   V = 2,    return 1:  further away than the held one:   0.5 * 1^2     = 0.5,     gradient 1
    #   V = -1,   return 1:  further away than the held one:   0.5 * 2^2     = 2,       gradient -2
    values = tensor([[0.25, 0.75, 2.0, -1.0]]).requires_grad_()
    returns = torch.ones(1, 4)
    loss, sums = clipped_value_loss(
        values, torch.zeros(1, 4), returns, torch.ones(1, 4), agg=sum_all, cliprange_value=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.28125 + 0.125 + 0.5 + 2.0)
    assert values.grad is not None
    assert values.grad.tolist() == [[-0.75, 0.0, 1.0, -2.0]]
    assert sums["vf_clipfrac"].item() == 1
    assert not sums["vf_clipfrac"].requires_grad


@QUICK
@given(batch=batches())
def test_a_wide_range_gives_half_the_squared_error(batch) -> None:
    values = batch["values"].clone().requires_grad_()
    loss, sums = clipped_value_loss(
        values, batch["old_values"], batch["returns"], batch.mask, agg=sum_all, cliprange_value=1e9
    )
    loss.backward()
    error = torch.where(batch.mask.bool(), batch["values"] - batch["returns"], 0.0)
    assert_equal(loss, 0.5 * error.square().sum())
    assert_equal(values.grad, error)
    assert sums["vf_clipfrac"].item() == 0
