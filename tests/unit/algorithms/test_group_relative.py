"""GRPO, RLOO and REINFORCE++ with baseline: a response against the others to the same prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages import (
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_advantage,
    compute_rloo_outcome_advantage,
)
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, tensor

GroupEstimator = Callable[[torch.Tensor, torch.Tensor, list[str] | np.ndarray], tuple[torch.Tensor, torch.Tensor]]

ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": compute_grpo_outcome_advantage,
    "dr. grpo": lambda rewards, mask, index: compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    ),
    "rloo": lambda rewards, mask, index: compute_rloo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=index
    ),
    "reinforce++ with baseline": lambda rewards, mask, index: compute_reinforce_plus_plus_baseline_advantage(
        token_level_rewards=rewards, response_mask=mask, index=index
    ),
}
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def _scores(batch: Batch) -> dict[int, float]:
    """The score of each row that is a response."""
    scores = {}
    for row, bits in enumerate(batch.mask.tolist()):
        if any(bits):
            scores[row] = sum(reward for reward, bit in zip(batch["rewards"][row].tolist(), bits, strict=True) if bit)
    return scores


def _slow(batch: Batch, advantage_of: Callable[[float, list[float]], float]) -> list[list[float]]:
    """`advantage_of(score, scores of the other responses of the group)` at every valid token."""
    scores = _scores(batch)
    advantages = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, score in scores.items():
        others = [scores[other] for other in scores if other != row and batch.groups[other] == batch.groups[row]]
        advantages[row] = [advantage_of(score, others) if bit else 0.0 for bit in batch.mask[row].tolist()]
    return advantages


def _slow_grpo(score: float, others: list[float]) -> float:
    std = statistics.stdev([score, *others]) if others else 0.0
    return (score - statistics.mean([score, *others])) / (std + 1e-6)


def _minus_group_mean(score: float, others: list[float]) -> float:
    return score - statistics.mean([score, *others])


def _minus_mean_of_others(score: float, others: list[float]) -> float:
    return score - statistics.mean(others) if others else 0.0


@pytest.mark.parametrize(
    ("name", "slow"),
    [("grpo", _slow_grpo), ("dr. grpo", _minus_group_mean), ("rloo", _minus_mean_of_others)],
)
@QUICK
@given(batch=batches())
def test_the_advantages_equal_the_slow_version_over_every_group(name, slow, batch) -> None:
    advantages, returns = ESTIMATORS[name](batch["rewards"], batch.mask, batch.groups)
    assert_equal(advantages, _slow(batch, slow))
    assert torch.equal(returns, advantages)


@QUICK
@given(batch=batches())
def test_reinforce_plus_plus_with_baseline_whitens_the_centred_scores_of_all_tokens(batch) -> None:
    advantages, returns = ESTIMATORS["reinforce++ with baseline"](batch["rewards"], batch.mask, batch.groups)
    centred = _slow(batch, _minus_group_mean)
    tokens = [centred[row][t] for row, t in batch.mask.nonzero().tolist()]
    std = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
    expected = torch.zeros_like(batch["rewards"])
    for row, t in batch.mask.nonzero().tolist():
        expected[row, t] = (centred[row][t] - statistics.mean(tokens)) / (std**2 + 1e-8) ** 0.5
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(returns, advantages)


# Group a has the scores 0, 2, 4: mean 2, std sqrt((4 + 0 + 4) / 2) = 2. Group b has one response and no baseline.
REWARDS = tensor([[0.0, 0.0], [0.5, 1.5], [5.0, 0.0], [4.0, 9.0]])
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])
INDEX = np.array(["a", "a", "b", "a"], dtype=object)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
        ("dr. grpo", [[-2.0, -2.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]]),
        # 0 - (2 + 4) / 2;  2 - (0 + 4) / 2;  none;  4 - (0 + 2) / 2
        ("rloo", [[-3.0, -3.0], [0.0, 0.0], [0.0, 0.0], [3.0, 0.0]]),
        # Tokens -2 -2 0 0 0 2: mean -1/3, sum of squares 12 - 6/9 = 34/3, variance 34/15 = 1.505545^2.
        (
            "reinforce++ with baseline",
            [[-1.107019, -1.107019], [0.221404, 0.221404], [0.221404, 0.0], [1.549826, 0.0]],
        ),
    ],
)
def test_hand_computed_with_a_group_of_one(name, expected) -> None:
    advantages, _ = ESTIMATORS[name](REWARDS, MASK, INDEX)
    torch.testing.assert_close(advantages, tensor(expected), rtol=1e-5, atol=1e-7)


def test_grpo_divides_by_the_unbiased_std() -> None:
    rewards, mask = tensor([[0.0], [4.0]]), torch.ones(2, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])
    # Mean 2, variance (4 + 4) / (2 - 1) = 8: 2 / sqrt(8) = 0.707107.
    torch.testing.assert_close(advantages, tensor([[-0.707107], [0.707107]]), rtol=1e-5, atol=0)


@each_estimator
@pytest.mark.parametrize("score", [0.1, 100.1, -0.7])
def test_equal_scores_have_no_advantage_although_their_mean_is_rounded(estimator, score) -> None:
    mask = torch.ones(7, 2)
    rewards = torch.zeros(7, 2)
    rewards[:, -1] = score
    advantages, _ = estimator(rewards, mask, ["a"] * 7)
    assert advantages.abs().max().item() < 1e-5


@each_estimator
@QUICK
@given(batch=batches(), names=st.permutations(["x", "y", "z"]))
def test_it_matters_who_shares_a_group_and_not_its_name(estimator, batch, names) -> None:
    renamed = [dict(zip("abc", names, strict=True))[group] for group in batch.groups]
    expected, _ = estimator(batch["rewards"], batch.mask, batch.groups)
    assert_equal(estimator(batch["rewards"], batch.mask, renamed)[0], expected)


@each_estimator
@QUICK
@given(batch=batches(), shifts=st.lists(st.floats(-10, 10), min_size=3, max_size=3))
def test_a_constant_added_to_all_scores_of_a_group_changes_nothing(estimator, batch, shifts) -> None:
    shift_of_group = dict(zip("abc", shifts, strict=True))
    shift_of_row = torch.tensor([shift_of_group[group] for group in batch.groups], dtype=torch.float64)
    # Divided among the valid tokens, so that it is the score that moves.
    shifted = batch["rewards"] + (shift_of_row / batch.mask.sum(dim=-1).clamp(min=1))[:, None]
    expected, _ = estimator(batch["rewards"], batch.mask, batch.groups)
    torch.testing.assert_close(estimator(shifted, batch.mask, batch.groups)[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr. grpo", "rloo"])
@QUICK
@given(batch=batches())
def test_the_advantages_of_a_group_add_up_to_zero(name, batch) -> None:
    advantages, _ = ESTIMATORS[name](batch["rewards"], batch.mask, batch.groups)
    of_response = advantages.sum(dim=-1) / batch.mask.sum(dim=-1).clamp(min=1)
    for group in set(batch.groups):
        rows = [row for row, other in enumerate(batch.groups) if other == group]
        assert abs(of_response[rows].sum().item()) < 1e-9


@QUICK
@given(batch=batches())
def test_reinforce_plus_plus_with_baseline_adds_up_to_zero_over_the_tokens_of_the_batch(batch) -> None:
    advantages, _ = ESTIMATORS["reinforce++ with baseline"](batch["rewards"], batch.mask, batch.groups)
    assert abs(advantages.sum().item()) < 1e-7


@each_estimator
def test_an_index_of_another_length_or_none_is_refused(estimator) -> None:
    with pytest.raises(ValueError, match="1 group ids for 2 responses"):
        estimator(torch.zeros(2, 1), torch.ones(2, 1), ["a"])
    with pytest.raises(ValueError, match="uid"):
        estimator(torch.zeros(2, 1), torch.ones(2, 1), None)
