"""A baseline for each token: the return of the group's rows in its column, weighed by the energy of their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from paceline.algorithms.advantages import get_adv_estimator
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, tensor

# One group; the second row has a hole, the third ends after two tokens.
REWARDS = tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
PROBABILITIES = tensor([[0.5, 0.8, 0.9], [0.4, 1.0, 0.7], [0.6, 0.3, 1.0]])
SQUARES = tensor([[0.4, 0.7, 0.85], [0.3, 1.0, 0.6], [0.5, 0.25, 1.0]])
WEIGHTS = tensor([[1.0, 2.0, 1.0], [0.5, 7.0, 1.0], [1.0, 1.0, 7.0]])


def estimate(name: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    columns = {
        "token_level_rewards": REWARDS,
        "response_mask": MASK,
        "index": ["a"] * 3,
        "old_log_probs": PROBABILITIES.log(),
        "sum_pi_squared": SQUARES,
    }
    return get_adv_estimator(name)(**columns | changes)


def test_by_columns_hand_computed() -> None:
    # Energies 1 - 2p + q: [.4 .1 .05; .5 . .2; .3 .65 .], added up [.4 .5 .55; .5 . .7; .3 .95 .]; returns 1, 0.25, 0.
    # Column 1: (0.4 + 0.125) / 1.2 = 0.4375; 2: 0.5 / 1.45 = 0.344828; 3: (0.55 + 0.175) / 1.25 = 0.58.
    advantages, returns = estimate("optimal_token_baseline")
    expected = [[0.5625, 0.655172, 0.42], [-0.1875, 0.0, -0.33], [-0.4375, -0.344828, 0.0]]
    torch.testing.assert_close(advantages, tensor(expected), rtol=0, atol=1e-6)
    assert returns.tolist() == [[1.0, 1.0, 1.0], [0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]


def test_weights_of_the_rollout_count_squared() -> None:
    # Energies [.4 .4 .05; .125 . .2; .3 .65 .], added up [.4 .8 .85; .125 . .325; .3 .95 .].
    # Column 1: (0.4 + 0.03125) / 0.825 = 0.522727; 2: 0.8 / 1.75 = 0.457143; 3: (0.85 + 0.08125) / 1.175 = 0.792553.
    advantages, _ = estimate("optimal_token_baseline", rollout_is_weights=WEIGHTS)
    expected = [[0.477273, 0.542857, 0.207447], [-0.272727, 0.0, -0.542553], [-0.522727, -0.457143, 0.0]]
    torch.testing.assert_close(advantages, tensor(expected), rtol=0, atol=1e-6)


def test_by_valid_tokens_hand_computed() -> None:
    # Compacted, the energies are [.4 .5 .55; .5 .7 .; .3 .95 .]: second (0.5 + 0.175) / 2.15 = 0.313953; third: alone.
    advantages, returns = estimate("tir_optimal_token_baseline")
    expected = [[0.5625, 0.686047, 1.0], [-0.1875, 0.0, -0.063953], [-0.4375, -0.313953, 0.0]]
    torch.testing.assert_close(advantages, tensor(expected), rtol=0, atol=1e-6)
    assert returns.tolist() == [[1.0, 1.0, 1.0], [0.25, 0.0, 0.25], [0.0, 0.0, 0.0]]


def test_where_one_row_is_left_it_has_no_baseline_and_learns_from_its_whole_return() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    advantages, _ = estimate("optimal_token_baseline", response_mask=mask)
    assert advantages[0, 2].item() == 1.0
    assert advantages[0, 1].item() == pytest.approx(1 - 0.5 / (0.5 + 0.5), abs=1e-6)  # row 2: 0.5 + 0 by then, return 0


def test_a_group_of_one_has_no_advantage() -> None:
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages, returns = estimate(name, index=["a", "b", "c"])
        assert not advantages.any()
        assert returns[0].tolist() == [1.0, 1.0, 1.0]


def _slow(batch: Batch, columns: dict[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`columns` has the places of the valid tokens of each row, by the number under which they are compared."""
    advantages, returns = torch.zeros_like(batch["rewards"]), torch.zeros_like(batch["rewards"])
    energies: dict[tuple[int, int], float] = {}
    for row, places in columns.items():
        energy = 0.0
        valid = [t for t in places if t >= 0]
        for k, t in enumerate(places):
            if t >= 0:
                p, q = (-batch["old_log_prob"][row, t].abs()).exp().item(), batch["old_values"][row, t].sigmoid().item()
                energy += max(0.0, 1 - 2 * p + q) * batch["ref_log_prob"][row, t].exp().item() ** 2
                energies[row, k] = energy
                returns[row, t] = sum(batch["rewards"][row, later].item() for later in valid if later >= t)
    for row, places in columns.items():
        group = [other for other in columns if batch.groups[other] == batch.groups[row] and any(batch.mask[other])]
        for k, t in enumerate(places):
            if t < 0 or len(group) == 1:
                continue
            there = [other for other in group if (other, k) in energies]
            weighed = sum(energies[other, k] * returns[other, columns[other][k]].item() for other in there)
            baseline = weighed / (sum(energies[other, k] for other in there) + 1e-8) if len(there) > 1 else 0.0
            advantages[row, t] = returns[row, t] - baseline
    return advantages, returns


def _estimated(batch: Batch, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return get_adv_estimator(name)(
        token_level_rewards=batch["rewards"],
        response_mask=batch.mask,
        index=batch.groups,
        old_log_probs=-batch["old_log_prob"].abs(),
        sum_pi_squared=batch["old_values"].sigmoid(),
        rollout_is_weights=batch["ref_log_prob"].exp(),
    )


@QUICK
@given(batch=batches())
def test_by_columns_it_equals_the_slow_version(batch) -> None:
    columns = {row: [t if bit else -1 for t, bit in enumerate(bits)] for row, bits in enumerate(batch.mask.tolist())}
    for found, expected in zip(_estimated(batch, "optimal_token_baseline"), _slow(batch, columns), strict=True):
        assert_equal(found, expected)


@QUICK
@given(batch=batches())
def test_by_valid_tokens_it_equals_the_slow_version(batch) -> None:
    width = batch.mask.shape[1]
    valid = {row: [t for t, bit in enumerate(bits) if bit] for row, bits in enumerate(batch.mask.tolist())}
    columns = {row: places + [-1] * (width - len(places)) for row, places in valid.items()}
    for found, expected in zip(_estimated(batch, "tir_optimal_token_baseline"), _slow(batch, columns), strict=True):
        assert_equal(found, expected)


@QUICK
@given(batch=batches())
def test_without_holes_both_are_the_same(batch) -> None:
    whole = Batch(batch.mask.sort(dim=-1, descending=True).values, batch.columns, batch.groups)
    results = (_estimated(whole, name) for name in ("optimal_token_baseline", "tir_optimal_token_baseline"))
    for one, other in zip(*results, strict=True):
        assert_equal(one, other)
