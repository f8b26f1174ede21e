from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from paceline.algorithms.aggregation import agg_loss
from paceline.algorithms.policy_loss import PolicyLoss, cispo_policy_loss, get_policy_loss, gspo_policy_loss
from paceline.catalog import LOSSES
from tests.unit.algorithms.algorithm_cases import (
    QUICK,
    Batch,
    assert_equal,
    batches,
    normaliser_of,
    sum_all,
    tensor,
)

LOW, HIGH = 0.2, 0.3
CLIPS = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": 3.0}
each_loss = pytest.mark.parametrize("policy_loss", [gspo_policy_loss, cispo_policy_loss])


def _run(policy_loss: PolicyLoss, batch: Batch, agg=sum_all) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Loss, metric sums and gradient by log_prob."""
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, sums = policy_loss(batch["old_log_prob"], log_prob, batch["advantages"], batch.mask, agg=agg, **CLIPS)
    loss.backward()
    assert log_prob.grad is not None
    assert not any(total.requires_grad for total in sums.values())
    return loss.detach(), sums, log_prob.grad


def _tokens(batch: Batch) -> list[tuple[int, int, float, float, float]]:
    """Row, position, ratio of the token, ratio of its whole response, advantage: of every valid token."""
    found = []
    for row, bits in enumerate(batch.mask.tolist()):
        positions = [t for t, bit in enumerate(bits) if bit]
        logs = [(batch["log_prob"][row, t] - batch["old_log_prob"][row, t]).item() for t in positions]
        for t, log in zip(positions, logs, strict=True):
            of_response = math.exp(sum(logs) / len(logs))
            found.append((row, t, math.exp(log), of_response, batch["advantages"][row, t].item()))
    return found


@QUICK
@given(batch=batches())
def test_gspo_equals_the_slow_version_token_by_token(batch) -> None:
    expected_loss, clipped_tokens, kl = 0.0, 0, 0.0
    expected_gradient = torch.zeros_like(batch["log_prob"])
    for row, t, token_ratio, ratio, advantage in _tokens(batch):
        kl -= math.log(token_ratio)
        held = min(ratio, 1 + HIGH) if advantage > 0 else max(ratio, 1 - LOW)
        expected_loss -= advantage * held
        if held == ratio:
            expected_gradient[row, t] = -advantage * ratio
        else:
            clipped_tokens += 1
    loss, sums, gradient = _run(gspo_policy_loss, batch)
    assert_equal(loss, expected_loss)
    assert_equal(gradient, expected_gradient)
    assert sums["pg_clipfrac"].item() == clipped_tokens
    assert_equal(sums["ppo_kl"], kl)


@QUICK
@given(batch=batches())
def test_gspo_with_seq_mean_token_mean_is_the_sequence_form_in_value_and_gradient(batch) -> None:
    """Equation 5 of the paper, differentiated as it stands: one advantage, one ratio, one clip for each response."""
    batch = batch.with_columns(advantages=batch["advantages"][:, :1].expand_as(batch.mask))
    normaliser = normaliser_of(batch.mask)
    loss, _, gradient = _run(
        gspo_policy_loss, batch, agg=lambda matrix: agg_loss(matrix, batch.mask, "seq-mean-token-mean", normaliser)
    )

    log_prob = batch["log_prob"].clone().requires_grad_()
    objectives = []
    for row, bits in enumerate(batch.mask.bool()):
        if bits.any():
            ratio = (log_prob[row, bits] - batch["old_log_prob"][row, bits]).mean().exp()
            advantage = batch["advantages"][row, 0]
            objectives.append(torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    plain = -torch.stack(objectives).mean() if objectives else (log_prob * 0).sum()
    plain.backward()
    assert_equal(loss, plain.detach())
    assert_equal(gradient, log_prob.grad)


def test_gspo_hand_computed_clips_a_whole_response() -> None:
    # Clip range [0.8, 1.3]. The responses have the token ratios
    #   (2, 0.5),  A =  1: s = 1, though both tokens are far outside: loss -1 each, gradient -1
    #   (4, 1),    A =  1: s = 2, held at 1.3:                        loss -1.3 each, gradient 0
    #   (0.25, 1), A = -2: s = 0.5, held at 0.8:                      loss 1.6 each, gradient 0
    #   (4, -),    A = -1: s = 4, above and not held:                 loss 4, gradient 4; the other token is padding
    ratios = tensor([[2.0, 0.5], [4.0, 1.0], [0.25, 1.0], [4.0, 9.0]])
    advantages = tensor([[1.0, 1.0], [1.0, 1.0], [-2.0, -2.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    log_prob = ratios.log().requires_grad_()
    loss, sums = gspo_policy_loss(torch.zeros(4, 2), log_prob, advantages, mask, agg=sum_all, **CLIPS)
    loss.backward()
    assert loss.item() == pytest.approx(-2.0 - 2.6 + 3.2 + 4.0, rel=1e-5)
    torch.testing.assert_close(log_prob.grad, tensor([[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [4.0, 0.0]]))
    assert sums["pg_clipfrac"].item() == 4
    # -ln(2 * 0.5 * 4 * 1 * 0.25 * 1 * 4) = -ln 4
    assert sums["ppo_kl"].item() == pytest.approx(-math.log(4), rel=1e-5)


@QUICK
@given(batch=batches())
def test_cispo_equals_the_slow_version_token_by_token(batch) -> None:
    expected_loss, clipped_tokens, kl = 0.0, 0, 0.0
    expected_gradient = torch.zeros_like(batch["log_prob"])
    for row, t, ratio, _, advantage in _tokens(batch):
        kl -= math.log(ratio)
        weight = min(max(ratio, 1 - LOW), 1 + HIGH)
        clipped_tokens += weight != ratio
        expected_loss -= weight * advantage * batch["log_prob"][row, t].item()
        expected_gradient[row, t] = -weight * advantage
    loss, sums, gradient = _run(cispo_policy_loss, batch)
    assert_equal(loss, expected_loss)
    assert_equal(gradient, expected_gradient)
    assert sums["pg_clipfrac"].item() == clipped_tokens
    assert_equal(sums["ppo_kl"], kl)


@QUICK
@given(batch=batches())
def test_inside_the_clip_range_cispo_has_the_gradient_of_the_surrogate(batch) -> None:
    """The weight has no gradient, and rho * grad log pi is grad rho."""
    near = batch.with_columns(old_log_prob=batch["log_prob"] + 0.15 * batch["values"].tanh())
    log_prob = near["log_prob"].clone().requires_grad_()
    surrogate = torch.where(near.mask.bool(), near["advantages"] * (log_prob - near["old_log_prob"]).exp(), 0.0)
    (-surrogate.sum()).backward()
    assert_equal(_run(cispo_policy_loss, near)[2], log_prob.grad)


def test_cispo_hand_computed_keeps_the_gradient_of_clipped_tokens() -> None:
    # Ratios 1, 2 (held at 1.3) and 0.5 (held at 0.8); advantages 2, 2, -1. With log_prob = -1 the loss is weight * A.
    log_prob = torch.full((1, 3), -1.0, requires_grad=True)
    old_log_prob = -1.0 - tensor([[1.0, 2.0, 0.5]]).log()
    loss, sums = cispo_policy_loss(
        old_log_prob, log_prob, tensor([[2.0, 2.0, -1.0]]), torch.ones(1, 3), agg=sum_all, **CLIPS
    )
    loss.backward()
    assert loss.item() == pytest.approx(2.0 + 2.6 - 0.8, rel=1e-5)
    torch.testing.assert_close(log_prob.grad, tensor([[-2.0, -2.6, 0.8]]))
    assert sums["pg_clipfrac"].item() == 2
    assert sums["ppo_kl"].item() == pytest.approx(0.0, abs=1e-6)  # -ln(1 * 2 * 0.5)


@each_loss
@QUICK
@given(batch=batches())
def test_at_the_old_policy_the_gradient_is_minus_the_advantage(policy_loss, batch) -> None:
    _, sums, gradient = _run(policy_loss, batch.with_columns(old_log_prob=batch["log_prob"]))
    assert_equal(gradient, torch.where(batch.mask.bool(), -batch["advantages"], 0.0))
    assert all(total.item() == 0 for total in sums.values())


def test_the_ratio_of_a_response_is_at_most_e_to_the_10_and_may_be_as_small_as_it_likes() -> None:
    log_prob, old_log_prob = tensor([[0.0, 0.0], [-15.0, -15.0]]), tensor([[-15.0, -15.0], [0.0, 0.0]])
    loss, _ = gspo_policy_loss(
        old_log_prob, log_prob, -torch.ones(2, 2), torch.tensor([[1, 1], [0, 0]]), agg=sum_all, **CLIPS
    )
    assert loss.item() == pytest.approx(2 * math.exp(10.0), rel=1e-5)
    loss, _ = gspo_policy_loss(
        old_log_prob, log_prob, torch.ones(2, 2), torch.tensor([[0, 0], [1, 1]]), agg=sum_all, **CLIPS
    )
    assert loss.item() == pytest.approx(-2 * math.exp(-15.0), rel=1e-5)


@each_loss
def test_a_ratio_beyond_float32_stays_finite(policy_loss) -> None:
    log_prob = tensor([[0.0], [-300.0], [0.0], [-300.0]]).requires_grad_()
    old_log_prob = tensor([[-300.0], [0.0], [-300.0], [0.0]])
    advantages = tensor([[1.0], [1.0], [-1.0], [-1.0]])
    loss, _ = policy_loss(old_log_prob, log_prob, advantages, torch.ones(4, 1), agg=sum_all, **CLIPS)
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad is not None
    assert log_prob.grad.isfinite().all()


def test_the_names_that_a_configuration_may_choose_are_registered() -> None:
    assert get_policy_loss("gspo") is gspo_policy_loss
    assert get_policy_loss("cispo") is cispo_policy_loss
    for name in LOSSES.built_in:
        get_policy_loss(name)
