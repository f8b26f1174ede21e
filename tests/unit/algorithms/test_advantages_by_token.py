"""GAE, REINFORCE++ and ReMax: rewards added up from each token on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages import get_adv_estimator
from paceline.algorithms.advantages_by_token import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_advantage,
    compute_remax_outcome_advantage,
    length_adaptive_lam,
)
from paceline.algorithms.masking import masked_whiten
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, tensor


def _slow_gae(batch: Batch, gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages before whitening, and returns: GAE as the sum of equation 16, over the valid tokens of each row."""
    advantages = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    returns = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, bits in enumerate(batch.mask.tolist()):
        positions = [t for t, bit in enumerate(bits) if bit]
        rewards = [batch["rewards"][row, t].item() for t in positions]
        values = [batch["values"][row, t].item() for t in positions] + [0.0]
        deltas = [reward + gamma * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
        for k, t in enumerate(positions):
            advantages[row][t] = sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(deltas)))
            returns[row][t] = advantages[row][t] + values[k]
    return advantages, returns


def _whitened(advantages: list[list[float]], batch: Batch) -> torch.Tensor:
    return masked_whiten(torch.tensor(advantages, dtype=torch.float64), batch.mask)


@QUICK
@given(batch=batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_the_explicit_sum_over_later_tokens(batch, gamma, lam) -> None:
    advantages, returns = compute_gae_advantage_return(batch["rewards"], batch["values"], batch.mask, gamma, lam)
    slow_advantages, slow_returns = _slow_gae(batch, gamma, lam)
    assert_equal(returns, slow_returns)
    assert_equal(advantages, _whitened(slow_advantages, batch))


@QUICK
@given(batch=batches())
def test_gae_with_lambda_and_gamma_one_is_reward_to_go_minus_value(batch) -> None:
    advantages, returns = compute_gae_advantage_return(batch["rewards"], batch["values"], batch.mask, 1.0, 1.0)
    mask = batch.mask.bool()
    rewards = torch.where(mask, batch["rewards"], 0.0)
    reward_to_go = torch.where(mask, rewards.flip(-1).cumsum(-1).flip(-1), 0.0)
    assert_equal(returns, reward_to_go)
    assert_equal(advantages, masked_whiten(reward_to_go - batch["values"], batch.mask))


@QUICK
@given(batch=batches(), gamma=st.floats(0, 1))
def test_gae_with_lambda_zero_is_the_one_step_error(batch, gamma) -> None:
    advantages, returns = compute_gae_advantage_return(batch["rewards"], batch["values"], batch.mask, gamma, 0.0)
    targets = torch.zeros_like(batch["values"])
    for row, bits in enumerate(batch.mask.tolist()):
        positions = [t for t, bit in enumerate(bits) if bit]
        next_values = [batch["values"][row, t] for t in positions[1:]] + [0.0]
        for k, t in enumerate(positions):
            targets[row, t] = batch["rewards"][row, t] + gamma * next_values[k]
    assert_equal(returns, targets)
    assert_equal(advantages, masked_whiten(targets - batch["values"], batch.mask))


def test_gae_hand_computed_with_a_hole_and_padding() -> None:
    nan = float("nan")
    # Two turns of one response: the token between them is a tool's, the last is padding.
    rewards = tensor([[0.0, nan, 1.0, nan]])
    values = tensor([[0.5, nan, 0.25, nan]])
    mask = torch.tensor([[1, 0, 1, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma=0.5, lam=0.5)
    # Last valid token: A = 1 - 0.25 = 0.75, return 0.75 + 0.25 = 1.
    # First: delta = 0 + 0.5 * 0.25 - 0.5 = -0.375; A = -0.375 + 0.25 * 0.75 = -0.1875; return -0.1875 + 0.5 = 0.3125.
    assert returns.tolist() == [[0.3125, 0.0, 1.0, 0.0]]
    # Two entries whiten to -1/sqrt(2) and 1/sqrt(2): mean 0.28125, deviation 0.46875, variance 2 * 0.46875^2 / 1.
    torch.testing.assert_close(advantages, tensor([[-0.707107, 0.0, 0.707107, 0.0]]), rtol=1e-5, atol=1e-6)


def test_gae_of_a_single_valid_token_has_advantage_zero_and_no_nan() -> None:
    advantages, returns = compute_gae_advantage_return(
        tensor([[1.0, 0.0]]), tensor([[0.25, 0.0]]), torch.tensor([[1, 0]]), 1.0, 1.0
    )
    assert advantages.tolist() == [[0.0, 0.0]]
    assert returns.tolist() == [[1.0, 0.0]]


@QUICK
@given(batch=batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1), lam_critic=st.floats(0, 1))
def test_decoupled_gae_has_the_returns_of_the_critics_lambda(batch, gamma, lam, lam_critic) -> None:
    columns = (batch["rewards"], batch["values"], batch.mask, gamma)
    advantages, returns = compute_gae_advantage_return(*columns, lam, lam_critic)
    assert torch.equal(advantages, compute_gae_advantage_return(*columns, lam)[0])
    assert torch.equal(returns, compute_gae_advantage_return(*columns, lam_critic)[1])


@QUICK
@given(batch=batches(), alpha=st.floats(0.1, 2))
def test_each_row_has_the_advantages_of_its_own_lambda(batch, alpha) -> None:
    slow = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, length in enumerate(batch.mask.sum(dim=-1).tolist()):
        lam = max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        slow[row] = _slow_gae(batch, 0.9, lam)[0][row]
    advantages, returns = get_adv_estimator("gae")(
        token_level_rewards=batch["rewards"],
        response_mask=batch.mask,
        values=batch["values"],
        gamma=0.9,
        lam=0.7,
        lam_length_alpha=alpha,
    )
    assert_equal(advantages, _whitened(slow, batch))
    assert_equal(returns, _slow_gae(batch, 0.9, 0.7)[1])  # without lam_critic, lam is the critic's


def test_vapo_hand_computed() -> None:
    # Three tokens and alpha 0.5: lambda 1 - 1 / 1.5 = 1/3. Deltas 0.3, 0.1, 0.4: A = 0.4, 0.1 + 0.4 / 3 and
    # 0.3 + 0.233333 / 3. The critic's targets with lambda 1 are the sums of later rewards.
    rewards, values, mask = tensor([[0.0, 0.0, 1.0]]), tensor([[0.2, 0.5, 0.6]]), torch.ones(1, 3)
    lam = length_adaptive_lam(mask, alpha=0.5)
    assert lam.tolist() == pytest.approx([1 / 3])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, lam.float(), lam_critic=1.0)
    assert_close = torch.testing.assert_close
    assert_close(advantages, masked_whiten(tensor([[0.377778, 0.233333, 0.4]]), mask), rtol=1e-4, atol=1e-5)
    assert_close(returns, torch.ones(1, 3))


def test_a_short_or_empty_response_has_lambda_zero() -> None:
    mask = torch.zeros(3, 1000)
    mask[1, :5] = 1
    mask[2] = 1
    assert length_adaptive_lam(mask, alpha=0.05).tolist() == pytest.approx([0.0, 0.0, 0.98])


def _slow_returns(batch: Batch, gamma: float) -> list[list[float]]:
    """Each valid token's reward, and those of the valid tokens after it, discounted by how many lie between."""
    returns = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, bits in enumerate(batch.mask.tolist()):
        positions = [t for t, bit in enumerate(bits) if bit]
        for k, t in enumerate(positions):
            returns[row][t] = sum(
                gamma**distance * batch["rewards"][row, later].item() for distance, later in enumerate(positions[k:])
            )
    return returns


@QUICK
@given(batch=batches(), gamma=st.floats(0, 1))
def test_reinforce_plus_plus_equals_the_slow_version(batch, gamma) -> None:
    advantages, returns = compute_reinforce_plus_plus_advantage(
        token_level_rewards=batch["rewards"], response_mask=batch.mask, gamma=gamma
    )
    slow = _slow_returns(batch, gamma)
    assert_equal(returns, slow)
    assert_equal(advantages, _whitened(slow, batch))
    assert abs(advantages.sum().item()) < 1e-7


@QUICK
@given(batch=batches(), shift=st.floats(-10, 10))
def test_reinforce_plus_plus_ignores_a_constant_added_to_every_score(batch, shift) -> None:
    last = batch.mask.bool() & (batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)
    shifted = batch["rewards"] + shift * last
    expected, _ = compute_reinforce_plus_plus_advantage(token_level_rewards=batch["rewards"], response_mask=batch.mask)
    advantages, _ = compute_reinforce_plus_plus_advantage(token_level_rewards=shifted, response_mask=batch.mask)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-7)


def test_reinforce_plus_plus_hand_computed_with_a_hole_and_padding() -> None:
    nan = float("nan")
    rewards = tensor([[1.0, nan, 4.0, nan], [nan, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]])
    advantages, returns = compute_reinforce_plus_plus_advantage(
        token_level_rewards=rewards, response_mask=mask, gamma=0.5
    )
    # Returns 1 + 0.5 * 4 = 3, 4 and 0: mean 7/3, variance (4/9 + 25/9 + 49/9) / 2 = 13/3 = 2.081666^2.
    assert returns.tolist() == [[3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    expected = tensor([[0.320256, 0.0, 0.800641, 0.0], [0.0, -1.120897, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_steps_over_a_turn_of_a_tool_and_sees_no_reward_there() -> None:
    rewards, mask = tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 2.0]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    _, returns = compute_reinforce_plus_plus_advantage(token_level_rewards=rewards, response_mask=mask, gamma=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0], [0.0, 0.0, 0.0]]


@QUICK
@given(batch=batches(), baseline=st.floats(-3, 3))
def test_remax_is_the_undiscounted_return_minus_the_baseline(batch, baseline) -> None:
    baselines = baseline * torch.arange(len(batch.mask), dtype=torch.float64)
    advantages, returns = compute_remax_outcome_advantage(
        token_level_rewards=batch["rewards"], response_mask=batch.mask, reward_baselines=baselines, gamma=0.1
    )
    slow = _slow_returns(batch, gamma=1.0)
    assert_equal(returns, slow)
    expected = torch.zeros_like(batch["rewards"])
    for row, t in batch.mask.nonzero().tolist():
        expected[row, t] = slow[row][t] - baseline * row
    assert_equal(advantages, expected)


def test_remax_hand_computed_with_the_reward_at_the_last_token() -> None:
    rewards = tensor([[0.0, 0.0, 1.0], [0.0, 0.25, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = compute_remax_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, reward_baselines=tensor([0.5, 1.0])
    )
    assert advantages.tolist() == [[0.5, 0.5, 0.5], [-0.75, -0.75, 0.0]]
    assert returns.tolist() == [[1.0, 1.0, 1.0], [0.25, 0.25, 0.0]]


def test_remax_of_a_response_that_scores_as_the_greedy_one_is_zero() -> None:
    rewards, mask = tensor([[0.0, 0.3]]), torch.ones(1, 2)
    advantages, _ = compute_remax_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, reward_baselines=rewards.sum(-1)
    )
    assert advantages.tolist() == [[0.0, 0.0]]


def test_remax_says_which_baselines_it_misses() -> None:
    columns = {"token_level_rewards": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}
    with pytest.raises(ValueError, match="reward_baselines; none were given"):
        compute_remax_outcome_advantage(**columns)
    with pytest.raises(ValueError, match=r"reward_baselines has shape \(2, 3\) for 2 responses"):
        compute_remax_outcome_advantage(**columns, reward_baselines=torch.zeros(2, 3))
