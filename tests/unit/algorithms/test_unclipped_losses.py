"""Losses without a clip of the ratio: each against a version that goes token by token, and by hand at its edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given

from paceline.algorithms.policy_loss import clipped_policy_loss, get_policy_loss
from paceline.errors import ConfigError
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, sum_all, tensor

SETTINGS = {
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.15,
    "clip_ratio_c": 2.5,
    "tau_pos": 0.8,
    "tau_neg": 1.3,
    "dro_beta": 0.4,
}


def run(
    name: str,
    old: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    **changes: object,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, metric sums, and the gradient by log_prob."""
    log_prob = log_prob.clone().requires_grad_()
    loss, sums = get_policy_loss(name)(old, log_prob, advantages, mask, agg=sum_all, **(SETTINGS | changes))
    loss.backward()
    assert not any(total.requires_grad for total in sums.values())
    return loss.detach(), sums, log_prob.grad


def reinforce(now: float, old: float, advantage: float) -> tuple[float, float]:
    return -advantage * now, -advantage


def dro(now: float, old: float, advantage: float) -> tuple[float, float]:
    loss = -(advantage * now - 0.2 * (now - old) ** 2)
    return loss, -advantage + 0.4 * (now - old)


def sapo(now: float, old: float, advantage: float) -> tuple[float, float]:
    tau = 0.8 if advantage > 0 else 1.3
    ratio = math.exp(now - old)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio


def dppo(now: float, old: float, advantage: float, far: Callable[[float, float, float], bool]) -> tuple[float, float]:
    p, p_old = math.exp(now), math.exp(old)
    if far(p, p_old, advantage):
        return 0.0, 0.0
    weight = min(p / p_old, 2.5)
    return -advantage * weight * now, -advantage * weight


def far_by_tv(p: float, p_old: float, advantage: float) -> bool:
    return p - p_old > 0.15 if advantage > 0 else p_old - p > 0.1


def far_by_kl(p: float, p_old: float, advantage: float) -> bool:
    k = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    return (k > 0.15 and p > p_old) if advantage > 0 else (k > 0.1 and p < p_old)


SLOW: dict[str, Callable[[float, float, float], tuple[float, float]]] = {
    "gpg": reinforce,
    "dro": dro,
    "sapo": sapo,
    "dppo_tv": lambda *args: dppo(*args, far_by_tv),
    "dppo_kl": lambda *args: dppo(*args, far_by_kl),
}


def with_probabilities(batch: Batch) -> Batch:
    """Log-probs are those of probabilities between 0 and 1."""
    return batch.with_columns(
        log_prob=batch["log_prob"].sigmoid().log(), old_log_prob=batch["old_log_prob"].sigmoid().log()
    )


@pytest.mark.parametrize("name", SLOW)
@QUICK
@given(batch=batches())
def test_a_loss_equals_the_slow_version_token_by_token(name: str, batch: Batch) -> None:
    batch = with_probabilities(batch)
    expected_loss, expected_gradient, kl = 0.0, torch.zeros_like(batch["log_prob"]), 0.0
    for row, t in batch.mask.nonzero().tolist():
        now, old, advantage = (batch[column][row, t].item() for column in ("log_prob", "old_log_prob", "advantages"))
        loss, expected_gradient[row, t] = SLOW[name](now, old, advantage)
        expected_loss += loss
        kl += old - now
    loss, sums, gradient = run(name, batch["old_log_prob"], batch["log_prob"], batch["advantages"], batch.mask)
    assert_equal(loss, expected_loss)
    assert_equal(gradient, expected_gradient)
    assert_equal(sums["ppo_kl"], kl)


@pytest.mark.parametrize("name", ["gpg", "dro", "sapo", "dppo_tv", "dppo_kl"])
@QUICK
@given(batch=batches())
def test_at_the_old_policy_the_gradient_is_minus_the_advantage(name: str, batch: Batch) -> None:
    old = with_probabilities(batch)["old_log_prob"]
    _, _, gradient = run(name, old, old, batch["advantages"], batch.mask)
    assert_equal(gradient, torch.where(batch.mask.bool(), -batch["advantages"], 0.0))


def test_dppo_masks_what_moved_far_along_its_advantage_and_bounds_the_weight_of_the_rest() -> None:
    # Probabilities were 0.5, 0.5, 0.5, 0.001; now 0.7 (A 1: too far up), 0.3 (A 1: against it), 0.3 (A -1: too far
    # down), 0.1 (A 1: moved by less than 0.15, but by a ratio of 100).
    old = tensor([[0.5, 0.5, 0.5, 0.001]]).log()
    now = tensor([[0.7, 0.3, 0.3, 0.1]]).log()
    advantages = tensor([[1.0, 1.0, -1.0, 1.0]])
    _, sums, gradient = run("dppo_tv", old, now, advantages, torch.ones(1, 4))
    torch.testing.assert_close(gradient, tensor([[0.0, -0.6, 0.0, -2.5]]))
    assert sums["pg_clipfrac"].item() == 2
    assert sums["pg_clipfrac_lower"].item() == 1


def test_dro_has_its_minimum_where_the_pull_balances_the_advantage() -> None:
    old = tensor([[-1.0, -2.0]])
    _, _, gradient = run("dro", old, old + tensor([[2.5, -5.0]]), tensor([[1.0, -2.0]]), torch.ones(1, 2))
    assert gradient.abs().max().item() < 1e-6


@pytest.mark.parametrize("dro_beta", [None, 0.0, -1.0])
def test_dro_wants_a_pull(dro_beta: float | None) -> None:
    column = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match=f"dro_beta is {dro_beta}"):
        run("dro", column, column, column, torch.ones(1, 1), dro_beta=dro_beta)


@pytest.mark.parametrize("name", ["sapo", "dppo_tv", "dppo_kl", "gpg", "dro", "bypass_mode", "geo_mean"])
def test_a_ratio_beyond_float32_stays_finite(name: str) -> None:
    old, now = tensor([[-300.0, 0.0, -300.0, 0.0]]), tensor([[0.0, -300.0, 0.0, -300.0]])
    loss, _, gradient = run(name, old, now, tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4))
    assert loss.isfinite()
    assert gradient.isfinite().all()


@QUICK
@given(batch=batches())
def test_bypass_is_the_clipped_surrogate_or_reinforce(batch: Batch) -> None:
    columns = batch["old_log_prob"], batch["log_prob"], batch["advantages"], batch.mask
    clips = {name: SETTINGS[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    assert_equal(run("bypass_mode", *columns)[0], clipped_policy_loss(*columns, agg=sum_all, **clips)[0])
    assert_equal(run("bypass_mode", *columns, loss_type="reinforce")[0], run("gpg", *columns)[0])
