from __future__ import annotations

import statistics
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages import (
    adv_estimator_names,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    get_adv_estimator,
    needs_critic,
    register_adv_estimator,
)
from paceline.algorithms.masking import masked_whiten
from paceline.errors import ConfigError
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


def _slow_grpo(batch: Batch, norm_by_std: bool) -> list[list[float]]:
    scores = {}
    for row, bits in enumerate(batch.mask.tolist()):
        if any(bits):
            scores[row] = sum(reward for reward, bit in zip(batch["rewards"][row].tolist(), bits, strict=True) if bit)
    advantages = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, score in scores.items():
        group = [scores[other] for other in scores if batch.groups[other] == batch.groups[row]]
        advantage = score - statistics.mean(group)
        if norm_by_std:
            advantage /= (statistics.stdev(group) if len(group) > 1 else 0.0) + 1e-6
        advantages[row] = [advantage if bit else 0.0 for bit in batch.mask[row].tolist()]
    return advantages


@pytest.mark.parametrize("norm_by_std", [True, False])
@QUICK
@given(batch=batches())
def test_grpo_equals_the_slow_version_over_every_group(norm_by_std, batch) -> None:
    advantages, returns = compute_grpo_outcome_advantage(
        batch["rewards"], batch.mask, batch.groups, norm_adv_by_std_in_grpo=norm_by_std
    )
    assert_equal(advantages, _slow_grpo(batch, norm_by_std))
    assert torch.equal(returns, advantages)


@pytest.mark.parametrize(
    ("norm_by_std", "expected"),
    [
        # Group a: scores 0, 2, 4: mean 2, std sqrt((4 + 0 + 4) / 2) = 2. Group b has one response and no baseline.
        (True, [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
        (False, [[-2.0, -2.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]]),
    ],
)
def test_grpo_hand_computed_with_a_group_of_one(norm_by_std, expected) -> None:
    rewards = tensor([[0.0, 0.0], [0.5, 1.5], [5.0, 0.0], [4.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])
    index = np.array(["a", "a", "b", "a"], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=norm_by_std)
    torch.testing.assert_close(advantages, tensor(expected), rtol=1e-5, atol=0)


def test_grpo_divides_by_the_unbiased_std() -> None:
    rewards, mask = tensor([[0.0], [4.0]]), torch.ones(2, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])
    # Mean 2, variance (4 + 4) / (2 - 1) = 8: 2 / sqrt(8) = 0.707107.
    torch.testing.assert_close(advantages, tensor([[-0.707107], [0.707107]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("score", [0.1, 100.1, -0.7])
def test_grpo_of_equal_scores_is_zero_although_their_mean_is_rounded(score) -> None:
    mask = torch.ones(7, 2)
    rewards = torch.zeros(7, 2)
    rewards[:, -1] = score
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 7)
    assert advantages.abs().max().item() < 1e-5


@QUICK
@given(batch=batches(), names=st.permutations(["x", "y", "z"]))
def test_grpo_depends_on_who_shares_a_group_and_not_on_its_name(batch, names) -> None:
    renamed = [dict(zip("abc", names, strict=True))[group] for group in batch.groups]
    expected, _ = compute_grpo_outcome_advantage(batch["rewards"], batch.mask, batch.groups)
    assert_equal(compute_grpo_outcome_advantage(batch["rewards"], batch.mask, renamed)[0], expected)


def test_grpo_refuses_an_index_of_another_length() -> None:
    with pytest.raises(ValueError, match="1 group ids for 2 responses"):
        compute_grpo_outcome_advantage(torch.zeros(2, 1), torch.ones(2, 1), ["a"])


def test_estimators_leave_their_inputs_as_they_were() -> None:
    rewards, values, mask = torch.rand(3, 4), torch.rand(3, 4), torch.tensor([[1, 1, 0, 0]] * 3)
    before = rewards.clone(), values.clone(), mask.clone()
    compute_gae_advantage_return(rewards, values, mask, 0.9, 0.9)
    compute_grpo_outcome_advantage(rewards, mask, ["a", "a", "b"])
    assert all(torch.equal(x, y) for x, y in zip((rewards, values, mask), before, strict=True))


def test_registered_estimators_are_called_alike_and_know_whether_they_need_a_critic() -> None:
    rewards, values, mask = torch.rand(2, 3), torch.rand(2, 3), torch.ones(2, 3)
    index = np.array(["a", "a"], dtype=object)
    columns = {"token_level_rewards": rewards, "response_mask": mask, "values": values, "index": index}
    settings = {"gamma": 0.9, "lam": 0.8, "norm_by_std": False}
    gae = get_adv_estimator("gae")(**columns, **settings)
    grpo = get_adv_estimator("grpo")(**columns, **settings)
    assert torch.equal(gae[0], compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)[0])
    assert torch.equal(gae[1], compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)[1])
    expected, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert torch.equal(grpo[0], expected)
    assert needs_critic("gae")
    assert not needs_critic("grpo")


def test_an_estimator_says_which_column_it_misses() -> None:
    columns = {"token_level_rewards": torch.zeros(1, 1), "response_mask": torch.ones(1, 1)}
    with pytest.raises(ValueError, match="values"):
        get_adv_estimator("gae")(**columns)
    with pytest.raises(ValueError, match="uid"):
        get_adv_estimator("grpo")(**columns)


def test_users_can_register_an_estimator_but_not_replace_one() -> None:
    name = f"test-{uuid.uuid4()}"

    @register_adv_estimator(name, needs_critic=True)
    def rewards_as_advantages(*, token_level_rewards, response_mask, **_):
        return token_level_rewards, token_level_rewards

    assert get_adv_estimator(name) is rewards_as_advantages
    assert {"gae", "grpo", name} <= set(adv_estimator_names())
    assert needs_critic(name)
    with pytest.raises(ValueError, match="already registered"):
        register_adv_estimator(name, needs_critic=False)(rewards_as_advantages)


def test_an_unknown_estimator_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator='grop'.*did you mean grpo\?"):
        get_adv_estimator("grop")
    with pytest.raises(ConfigError, match="gae, grpo"):
        needs_critic("ga-e-misspelt-beyond-recognition")
