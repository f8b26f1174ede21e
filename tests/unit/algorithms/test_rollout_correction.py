"""Importance weights and rejection: against versions that go token by token, and numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.rollout_correction import (
    Rejection,
    RolloutCorrection,
    importance_weights,
    kept_tokens,
    log_ratio_of,
    normalised,
    response_weights,
    rewards_on_kept,
    statistic,
)
from paceline.config.thresholds import CRITERIA
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, tensor

TRAINER = tensor([[-0.5, -1.2, -2.0], [-0.1, -0.7, -1.5]])
ROLLOUT = tensor([[-0.6, -2.2, -1.9], [-0.1, -9.9, -1.1]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])
LOG_RATIO = log_ratio_of(TRAINER, ROLLOUT, MASK)


def weights_of(log_ratio: torch.Tensor, mask: torch.Tensor, correction: RolloutCorrection) -> torch.Tensor:
    assert correction.level is not None
    weights = importance_weights(log_ratio, mask, correction)
    return normalised(weights, mask, correction.level) if correction.normalise else weights


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (RolloutCorrection("token", None, 2.0), [[1.10517, 2.0, 0.90484], [1.0, 0.0, 0.67032]]),
        (
            RolloutCorrection("token", None, 2.0, normalise=True),
            [[0.972805, 1.760462, 0.796466], [0.880231, 0.0, 0.590036]],
        ),
        (RolloutCorrection("sequence", None, 2.0), [[2.0, 2.0, 2.0], [0.67032, 0.0, 0.67032]]),
        (
            RolloutCorrection("sequence", None, 2.0, normalise=True),
            [[1.497948, 1.497948, 1.497948], [0.502052, 0.0, 0.502052]],
        ),
        (RolloutCorrection("token", 0.5, 2.0), [[1.10517, 0.0, 0.90484], [1.0, 0.0, 0.67032]]),
    ],
)
def test_weights_are_the_numbers_that_others_compute(
    correction: RolloutCorrection, expected: list[list[float]]
) -> None:
    found = weights_of(LOG_RATIO, MASK, correction)
    torch.testing.assert_close(found, tensor(expected), atol=5e-6, rtol=0)


def slow_weights(batch: Batch, correction: RolloutCorrection) -> torch.Tensor:
    weights = torch.zeros_like(batch["log_prob"])
    of_rows = []
    for row, bits in enumerate(batch.mask.tolist()):
        logs = {
            t: (batch["log_prob"][row, t] - batch["old_log_prob"][row, t]).item() for t, bit in enumerate(bits) if bit
        }
        for t, log in logs.items():
            r = math.exp(log if correction.level == "token" else sum(logs.values()))
            if correction.low is None:
                weights[row, t] = min(r, correction.high)
            else:
                weights[row, t] = r if correction.low <= r <= correction.high else 0.0
        if logs:
            of_rows.append(weights[row, next(iter(logs))].item())
    if correction.normalise and of_rows:
        of_tokens = weights[batch.mask.bool()].tolist()
        numbers = of_tokens if correction.level == "token" else of_rows
        mean = sum(numbers) / len(numbers)
        weights = weights / mean if mean > 1e-8 else weights
    return weights


@QUICK
@given(
    batch=batches(),
    level=st.sampled_from(["token", "sequence"]),
    low=st.sampled_from([None, 0.5]),
    normalise=st.booleans(),
)
def test_weights_equal_the_slow_version(batch: Batch, level: str, low: float | None, normalise: bool) -> None:
    correction = RolloutCorrection(level, low, 1.5, normalise)
    log_ratio = log_ratio_of(batch["log_prob"], batch["old_log_prob"], batch.mask)
    assert_equal(weights_of(log_ratio, batch.mask, correction), slow_weights(batch, correction))


def test_the_bounds_of_r_hold_r_itself() -> None:
    """The second token has r = e: it is within 0.5 and 5, and not within 0.2 and 2."""
    assert kept_tokens(LOG_RATIO, MASK, (Rejection.of_ratio("token_k1", 0.5, 5.0),)).tolist() == MASK.tolist()
    kept = kept_tokens(LOG_RATIO, MASK, (Rejection.of_ratio("token_k1", 0.2, 2.0),))
    assert kept.tolist() == [[1, 0, 1], [1, 0, 1]]
    # And the last one, r = e^-0.4 = 0.67, is below 0.8.
    kept = kept_tokens(LOG_RATIO, MASK, (Rejection.of_ratio("token_k1", 0.8, 5.0),))
    assert kept.tolist() == [[1, 1, 1], [1, 0, 0]]


TOKEN_DROPPED, ROW_DROPPED = [[1, 0, 1], [1, 0, 1]], [[0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("rejection", "statistics", "kept"),
    [
        (Rejection.of_ratio("token_k1", 0.5, 2.0), [-0.1, 0.4], TOKEN_DROPPED),
        (Rejection("token_k2", 0.0, 0.1), [0.005, 0.08], TOKEN_DROPPED),
        (Rejection("token_k3", 0.0, 0.1), [0.0051709, 0.0703200], TOKEN_DROPPED),
        (Rejection.of_ratio("seq_sum_k1", 0.5, 2.0), [-1.0, 0.4], ROW_DROPPED),
        (Rejection.of_ratio("seq_mean_k1", 0.8, 1.25), [-0.33333, 0.2], ROW_DROPPED),
        (Rejection("seq_mean_k3", 0.0, 0.1), [0.242763, 0.03516], ROW_DROPPED),
        (Rejection("seq_sum_k2", 0.0, 0.1), [0.51, 0.08], ROW_DROPPED),
        (Rejection("seq_max_k2", 0.0, 0.1), [0.5, 0.08], ROW_DROPPED),
        (Rejection("seq_max_k3", 0.0, 0.1), [0.718282, 0.07032], ROW_DROPPED),
    ],
    ids=lambda value: value.criterion if isinstance(value, Rejection) else None,
)
def test_criteria_drop_what_others_drop(rejection: Rejection, statistics: list[float], kept: list[list[int]]) -> None:
    """The statistic at the first token and at the last, by hand or as others compute it."""
    found = statistic(LOG_RATIO, MASK, rejection.criterion)
    assert [found[0, 0].item(), found[1, 2].item()] == pytest.approx(statistics, abs=5e-6)
    assert kept_tokens(LOG_RATIO, MASK, (rejection,)).tolist() == kept


def slow_statistic(logs: list[float], criterion: str) -> list[float]:
    scope, _, kind = criterion.rpartition("_")
    of_tokens = [{"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind] for x in logs]
    if scope == "token":
        return of_tokens
    whole = {"seq_sum": sum(of_tokens), "seq_mean": sum(of_tokens) / len(logs), "seq_max": max(of_tokens)}[scope]
    return [whole] * len(logs)


@pytest.mark.parametrize("criterion", CRITERIA)
@QUICK
@given(batch=batches())
def test_a_criterion_equals_the_slow_version(criterion: str, batch: Batch) -> None:
    log_ratio = log_ratio_of(batch["log_prob"], batch["old_log_prob"], batch.mask)
    found = statistic(log_ratio, batch.mask, criterion)
    kept = kept_tokens(log_ratio, batch.mask, (Rejection(criterion, -0.3, 0.5),))
    for row, bits in enumerate(batch.mask):
        places = bits.nonzero().flatten().tolist()
        expected = slow_statistic(log_ratio[row, places].tolist(), criterion) if places else []
        assert_equal(found[row, places], torch.tensor(expected, dtype=found.dtype))
        assert kept[row, places].tolist() == [int(-0.3 <= value <= 0.5) for value in expected]


def test_a_token_is_kept_if_all_criteria_agree() -> None:
    both = (Rejection.of_ratio("token_k1", 0.95, 5.0), Rejection("token_k2", 0.0, 0.1))
    assert kept_tokens(LOG_RATIO, MASK, both).tolist() == [[1, 0, 0], [1, 0, 0]]


@QUICK
@given(batch=batches())
def test_a_response_keeps_its_rewards_as_long_as_it_keeps_a_token(batch: Batch) -> None:
    kept = batch.mask * (batch["values"] > 0)
    moved = rewards_on_kept(batch["rewards"], batch.mask, kept)
    assert_equal(moved.sum(dim=-1), torch.where(batch.mask.bool(), batch["rewards"], 0.0).sum(dim=-1))
    stays = kept.bool().any(dim=-1)
    assert (moved[stays][kept[stays] == 0] == 0).all()
    # What a kept token sees from itself on is what it saw before, but for tokens that come before the first kept one.
    for row in stays.nonzero().flatten().tolist():
        first = int(kept[row].bool().int().argmax())
        for t in kept[row].nonzero().flatten().tolist():
            if t > first:
                valid = batch.mask[row, t:].bool()
                assert_equal(moved[row, t:].sum(), batch["rewards"][row, t:][valid].sum())


def test_the_weight_of_a_response_is_a_geometric_mean() -> None:
    weights = response_weights(tensor([[2.0, 1.0, 0.5], [1.0, 9.0, 0.25]]), MASK)
    torch.testing.assert_close(weights, tensor([[1.0, 1.0, 1.0], [0.5, 0.0, 0.5]]))


def test_a_ratio_beyond_float32_stays_finite() -> None:
    log_ratio = tensor([[300.0, -300.0]])
    weights = importance_weights(log_ratio, torch.ones(1, 2), RolloutCorrection("token", None, 1e30))
    assert weights[0].tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-5)
    for criterion in CRITERIA:
        assert statistic(log_ratio, torch.ones(1, 2), criterion).isfinite().all()
