from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from paceline.algorithms.aggregation import agg_loss
from paceline.algorithms.policy_loss import geo_mean_policy_loss
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, normaliser_of, tensor

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.4, "clip_ratio_c": 3.0}


@QUICK
@given(batch=batches())
def test_the_loss_is_a_mean_over_responses_of_geometric_means(batch: Batch) -> None:
    batch = batch.with_columns(advantages=batch["advantages"][:, :1].expand_as(batch.mask))
    normaliser = normaliser_of(batch.mask)
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, sums = geo_mean_policy_loss(
        batch["old_log_prob"],
        log_prob,
        batch["advantages"],
        batch.mask,
        agg=lambda matrix: agg_loss(matrix, batch.mask, "seq-mean-token-mean", normaliser),
        **CLIPS,
    )
    loss.backward()
    expected, gradient, clipped = 0.0, torch.zeros_like(log_prob), 0
    rows = [row for row, bits in enumerate(batch.mask) if bits.any()]
    for row in rows:
        places = batch.mask[row].nonzero().flatten().tolist()
        advantage = batch["advantages"][row, 0].item()
        logs = [(batch["log_prob"][row, t] - batch["old_log_prob"][row, t]).item() for t in places]
        held = [min(x, 0.4) if advantage > 0 else max(x, -0.2) for x in logs]
        of_response = -advantage * math.exp(sum(held) / len(held))
        expected += of_response / len(rows)
        for t, x, y in zip(places, logs, held, strict=True):
            gradient[row, t] = of_response / len(places) / len(rows) if x == y else 0.0
            clipped += x != y
    assert_equal(loss.detach(), expected)
    assert_equal(log_prob.grad, gradient)
    assert sums["pg_clipfrac"].item() == clipped


def test_one_outlier_moves_a_geometric_mean_little() -> None:
    """Ratios 1, 1, 1 and e^0.4 (held, though it was e^5): e^0.1 and not their arithmetic mean."""
    loss, sums = geo_mean_policy_loss(
        torch.zeros(1, 4),
        tensor([[0.0, 0.0, 0.0, 5.0]]),
        torch.ones(1, 4),
        torch.ones(1, 4),
        agg=lambda matrix: matrix.mean(),
        **CLIPS,
    )
    assert loss.item() == pytest.approx(-math.exp(0.1), rel=1e-6)
    assert sums["pg_clipfrac"].item() == 1
