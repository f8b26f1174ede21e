"""clip_cov and kl_cov: which tokens are chosen, and what becomes of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.covariance_losses import choose_at_random, choose_largest, covariances
from paceline.algorithms.policy_loss import get_policy_loss
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, sum_all, tensor

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
LOG_PROB = tensor([[-0.4, -1.6, -1.0], [-0.3, -0.7, -1.45]])
ADVANTAGES = tensor([[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_covariances_by_hand() -> None:
    # Means over the five tokens: log-prob -0.95, advantage 0.4.
    expected = tensor([[0.33, -0.39, -0.03], [-0.585, 0.0, 0.45]])
    torch.testing.assert_close(covariances(LOG_PROB, ADVANTAGES, MASK), expected)


@QUICK
@given(batch=batches(), share=st.floats(0.01, 1.0))
def test_the_largest_are_chosen_and_at_least_one(batch: Batch, share: float) -> None:
    covariance = covariances(batch["log_prob"], batch["advantages"], batch.mask)
    chosen = choose_largest(covariance, batch.mask, share=share)
    num_tokens = int(batch.mask.sum())
    assert int(chosen.sum()) == (max(math.floor(share * num_tokens), 1) if num_tokens else 0)
    assert not (chosen & (batch.mask == 0)).any()
    others = covariance[batch.mask.bool() & ~chosen]
    if chosen.any() and len(others):
        assert covariance[chosen].min() >= others.max()


@QUICK
@given(batch=batches(), share=st.floats(0.01, 1.0), seed=st.integers(0, 100))
def test_a_share_of_all_tokens_is_drawn_between_the_bounds(batch: Batch, share: float, seed: int) -> None:
    covariance = covariances(batch["log_prob"], batch["advantages"], batch.mask)
    chosen = choose_at_random(covariance, batch.mask, share=share, low=-0.1, high=0.5, generator=generator(seed))
    candidates = batch.mask.bool() & (covariance > -0.1) & (covariance < 0.5)
    wanted = max(math.floor(share * int(batch.mask.sum())), 1)
    assert int(chosen.sum()) == min(wanted, int(candidates.sum()))
    assert not (chosen & ~candidates).any()


def test_each_candidate_is_drawn_sometimes_and_a_seed_draws_the_same() -> None:
    covariance = covariances(LOG_PROB, ADVANTAGES, MASK)

    def draw(seed: int) -> list[list[int]]:
        chosen = choose_at_random(covariance, MASK, share=0.2, low=0.2, high=5.0, generator=generator(seed))
        return chosen.nonzero().tolist()

    assert {str(draw(seed)) for seed in range(20)} == {"[[0, 0]]", "[[1, 2]]"}
    assert draw(3) == draw(3)


@QUICK
@given(batch=batches())
def test_clip_cov_is_the_clipped_surrogate_without_the_chosen_tokens(batch: Batch) -> None:
    chosen = batch["values"] > 0
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, sums = get_policy_loss("clip_cov")(
        batch["old_log_prob"], log_prob, batch["advantages"], batch.mask, agg=sum_all, chosen=chosen, **CLIPS
    )
    loss.backward()
    expected, gradient, drawn = 0.0, torch.zeros_like(log_prob), 0
    for row, t in batch.mask.nonzero().tolist():
        if chosen[row, t]:
            drawn += 1
            continue
        advantage = batch["advantages"][row, t].item()
        ratio = math.exp(batch["log_prob"][row, t].item() - batch["old_log_prob"][row, t].item())
        held = min(ratio, 1.3) if advantage > 0 else max(ratio, 0.8)
        expected -= advantage * held
        gradient[row, t] = -advantage * ratio if held == ratio else 0.0
    assert_equal(loss.detach(), expected)
    assert_equal(log_prob.grad, gradient)
    assert sums["pg_clipfrac"].item() == drawn


@QUICK
@given(batch=batches())
def test_kl_cov_has_no_clip_and_penalises_the_chosen_tokens(batch: Batch) -> None:
    chosen = batch["values"] > 0
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, sums = get_policy_loss("kl_cov")(
        batch["old_log_prob"],
        log_prob,
        batch["advantages"],
        batch.mask,
        agg=sum_all,
        chosen=chosen,
        ppo_kl_coef=0.7,
        **CLIPS,
    )
    loss.backward()
    expected, gradient, kl = 0.0, torch.zeros_like(log_prob), 0.0
    for row, t in batch.mask.nonzero().tolist():
        x = batch["log_prob"][row, t].item() - batch["old_log_prob"][row, t].item()
        slope = -batch["advantages"][row, t].item() * math.exp(x)
        penalty = 0.7 if chosen[row, t] else 0.0
        expected += slope + penalty * abs(x)
        gradient[row, t] = slope + penalty * math.copysign(1.0, x)
        kl += abs(x)
    assert_equal(loss.detach(), expected)
    assert_equal(log_prob.grad, gradient)
    assert_equal(sums["ppo_kl"], kl)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_without_a_choice_there_is_no_loss(name: str) -> None:
    with pytest.raises(ValueError, match="needs the tokens that were chosen"):
        get_policy_loss(name)(LOG_PROB, LOG_PROB, ADVANTAGES, MASK, agg=sum_all, **CLIPS)
