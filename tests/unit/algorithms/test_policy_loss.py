from __future__ import annotations

import math
import uuid

import pytest
import torch
from hypothesis import given

from paceline.algorithms.policy_loss import (
    clipped_policy_loss,
    get_policy_loss,
    register_policy_loss,
)
from paceline.errors import ConfigError
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, sum_all, tensor

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def _slow_policy_loss(batch: Batch, low: float, high: float, c: float) -> dict[str, float]:
    """Token by token with ifs."""
    totals = {"loss": 0.0, "pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": 0.0}
    for row, t in batch.mask.nonzero().tolist():
        log_prob, old, advantage = (batch[name][row, t].item() for name in ("log_prob", "old_log_prob", "advantages"))
        ratio = math.exp(log_prob - old)
        totals["ppo_kl"] += old - log_prob
        if advantage >= 0:
            if ratio > 1 + high:
                totals["pg_clipfrac"] += 1
            totals["loss"] -= advantage * min(ratio, 1 + high)
        elif ratio > c:
            totals["pg_clipfrac_lower"] += 1
            totals["loss"] -= advantage * c
        else:
            if ratio < 1 - low:
                totals["pg_clipfrac"] += 1
            totals["loss"] -= advantage * max(ratio, 1 - low)
    return totals


@QUICK
@given(batch=batches())
def test_the_loss_and_its_metrics_equal_the_slow_version(batch) -> None:
    loss, sums = clipped_policy_loss(
        batch["old_log_prob"],
        batch["log_prob"],
        batch["advantages"],
        batch.mask,
        agg=sum_all,
        clip_ratio_low=0.2,
        clip_ratio_high=0.4,
        clip_ratio_c=2.0,
    )
    expected = _slow_policy_loss(batch, low=0.2, high=0.4, c=2.0)
    assert_equal(loss, expected.pop("loss"))
    assert set(sums) == set(expected)
    for name, total in expected.items():
        assert_equal(sums[name], total)


def test_each_side_of_the_clip_hand_computed() -> None:
    # Clip range [0.8, 1.3], dual clip 3. The tokens, left to right:
    #   A =  2, ratio 1.1: inside,              loss -2.2, gradient -A * ratio = -2.2
    #   A =  2, ratio 1.5: held at 1.3,         loss -2.6, gradient 0
    #   A =  2, ratio 0.5: below, not held,     loss -1,   gradient -1
    #   A = -2, ratio 0.5: held at 0.8,         loss 1.6,  gradient 0
    #   A = -2, ratio 2:   above, not held,     loss 4,    gradient 4
    #   A = -2, ratio 5:   dual clip, 3 * |A|,  loss 6,    gradient 0
    ratios = tensor([[1.1, 1.5, 0.5, 0.5, 2.0, 5.0]])
    advantages = tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    old_log_prob = torch.full_like(ratios, -1.0)
    log_prob = (old_log_prob + ratios.log()).requires_grad_()
    token_losses = []

    def agg(loss_mat: torch.Tensor) -> torch.Tensor:
        token_losses.append(loss_mat.detach())
        return loss_mat.sum()

    loss, sums = clipped_policy_loss(old_log_prob, log_prob, advantages, torch.ones(1, 6), agg=agg, **CLIPS)
    loss.backward()
    torch.testing.assert_close(token_losses[0], tensor([[-2.2, -2.6, -1.0, 1.6, 4.0, 6.0]]))
    torch.testing.assert_close(log_prob.grad, tensor([[-2.2, 0.0, -1.0, 0.0, 4.0, 0.0]]))
    assert sums["pg_clipfrac"].item() == 2
    assert sums["pg_clipfrac_lower"].item() == 1
    # The product of the ratios is 4.125; ppo_kl = -ln 4.125 = -1.417066
    assert sums["ppo_kl"].item() == pytest.approx(-1.417066, rel=1e-5)


@QUICK
@given(batch=batches())
def test_clipped_tokens_and_only_those_have_no_gradient(batch) -> None:
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, _ = clipped_policy_loss(
        batch["old_log_prob"], log_prob, batch["advantages"], batch.mask, agg=sum_all, **CLIPS
    )
    loss.backward()
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    rises = batch["advantages"] > 0
    clipped = (rises & (ratio > 1.3)) | (~rises & (ratio < 0.8)) | (~rises & (ratio > 3.0))
    expected = torch.where(clipped | ~batch.mask.bool(), 0.0, -batch["advantages"] * ratio)
    assert_equal(log_prob.grad, expected)


@QUICK
@given(batch=batches())
def test_at_the_old_policy_the_gradient_is_minus_the_advantage(batch) -> None:
    log_prob = batch["old_log_prob"].clone().requires_grad_()
    loss, sums = clipped_policy_loss(
        batch["old_log_prob"], log_prob, batch["advantages"], batch.mask, agg=sum_all, **CLIPS
    )
    loss.backward()
    assert_equal(log_prob.grad, torch.where(batch.mask.bool(), -batch["advantages"], 0.0))
    assert all(total.item() == 0 for total in sums.values())


def test_a_ratio_beyond_float32_stays_finite() -> None:
    log_prob = tensor([[0.0, -300.0, 0.0, -300.0]]).requires_grad_()
    old_log_prob = tensor([[-300.0, 0.0, -300.0, 0.0]])
    advantages = tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, sums = clipped_policy_loss(old_log_prob, log_prob, advantages, torch.ones(1, 4), agg=sum_all, **CLIPS)
    loss.backward()
    # Held at 1.3; e^-20 (not 0); the dual clip's 3; held at 0.8.
    assert loss.item() == pytest.approx(-1.3 - math.exp(-20) + 3.0 + 0.8, rel=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert sums["ppo_kl"].item() == 0.0  # -300 + 300 - 300 + 300: the metric is not limited


def test_metrics_carry_no_gradient() -> None:
    log_prob = torch.zeros(1, 2, requires_grad=True)
    _, sums = clipped_policy_loss(torch.zeros(1, 2), log_prob, torch.ones(1, 2), torch.ones(1, 2), agg=sum_all, **CLIPS)
    assert not any(total.requires_grad for total in sums.values())


@pytest.mark.parametrize("clip_ratio_c", [1.0, 0.5, -1.0])
def test_a_dual_clip_at_or_below_one_is_refused(clip_ratio_c) -> None:
    column = torch.zeros(1, 1)
    clips = {**CLIPS, "clip_ratio_c": clip_ratio_c}
    with pytest.raises(ConfigError, match=f"clip_ratio_c is {clip_ratio_c}"):
        clipped_policy_loss(column, column, column, torch.ones(1, 1), agg=sum_all, **clips)


def test_vanilla_is_the_clipped_surrogate_and_users_can_register_others() -> None:
    assert get_policy_loss("vanilla") is clipped_policy_loss
    name = f"test-{uuid.uuid4()}"

    @register_policy_loss(name)
    def reinforce(old_log_prob, log_prob, advantages, response_mask, *, agg, **_):
        return agg(-advantages * log_prob), {}

    assert get_policy_loss(name) is reinforce
    with pytest.raises(ValueError, match="already registered"):
        register_policy_loss("vanilla")(reinforce)


def test_an_unknown_loss_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"policy_loss\.loss_mode='vanila'.*did you mean vanilla\?"):
        get_policy_loss("vanila")
