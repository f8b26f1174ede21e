from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.kl import (
    KL_KINDS,
    KL_LOSS_KINDS,
    AdaptiveKLController,
    FixedKLController,
    kl_loss,
    kl_penalty,
    make_kl_controller,
)
from paceline.errors import ConfigError, NonFiniteError
from tests.unit.algorithms.algorithm_cases import QUICK, assert_equal, batches, tensor

SLOW = {
    "kl": lambda lp, ref: lp - ref,
    "abs": lambda lp, ref: abs(lp - ref),
    "mse": lambda lp, ref: (lp - ref) ** 2 / 2,
    "low_var_kl": lambda lp, ref: math.exp(ref - lp) - (ref - lp) - 1,
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", SLOW)
@QUICK
@given(batch=batches())
def test_estimators_equal_the_formula_token_by_token(kind, batch) -> None:
    log_prob, ref_log_prob = batch["log_prob"], batch["ref_log_prob"]
    expected = [
        [SLOW[kind](lp, ref) for lp, ref in zip(lps, refs, strict=True)]
        for lps, refs in zip(log_prob.tolist(), ref_log_prob.tolist(), strict=True)
    ]
    assert_equal(kl_penalty(log_prob, ref_log_prob, kind), expected)


@pytest.mark.parametrize(("name", "alias"), ALIASES.items())
def test_both_names_of_an_estimator_give_the_same(name, alias) -> None:
    log_prob, ref_log_prob = tensor([-1.0, -2.0]), tensor([-1.5, -0.5])
    assert torch.equal(kl_penalty(log_prob, ref_log_prob, name), kl_penalty(log_prob, ref_log_prob, alias))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # log_prob - ref_log_prob is ln 2 and -ln 2; ln 2 = 0.693147
        ("kl", [0.693147, -0.693147]),
        ("abs", [0.693147, 0.693147]),
        ("mse", [0.240227, 0.240227]),  # 0.480453 / 2
        ("low_var_kl", [0.193147, 0.306853]),  # 1/2 + 0.693147 - 1 and 2 - 0.693147 - 1
    ],
)
def test_hand_computed_estimates(kind, expected) -> None:
    log_prob = tensor([math.log(0.5), math.log(0.25)])
    ref_log_prob = tensor([math.log(0.25), math.log(0.5)])
    torch.testing.assert_close(kl_penalty(log_prob, ref_log_prob, kind), tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_of_k1_and_k3_under_the_policy_is_the_exact_kl(kind) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    assert_equal((policy * kl_penalty(policy.log(), reference.log(), kind)).sum(), exact)


@QUICK
@given(difference=st.floats(-15, 15), log_prob=st.floats(-30, 0))
def test_k3_is_not_negative(difference, log_prob) -> None:
    log_probs = torch.tensor([log_prob], dtype=torch.float64)
    assert kl_penalty(log_probs, log_probs + difference, "k3").item() >= -1e-14


def test_k3_of_nearly_equal_float32_log_probs_is_not_rounding_error() -> None:
    # k3 is about d^2 / 2 = 5e-9 for d = 1e-4; e^d - 1 - d in float32 has an error of 6e-8.
    ref_log_prob = torch.tensor([1e-4])
    assert kl_penalty(torch.tensor([0.0]), ref_log_prob, "k3").item() == pytest.approx(5e-9, rel=1e-2)


def test_k3_stays_finite_where_the_exponential_would_overflow() -> None:
    log_prob = torch.tensor([-200.0, 0.0], requires_grad=True)
    estimate = kl_penalty(log_prob, torch.tensor([0.0, -200.0]), "k3")
    # d = 200 counts as 20: e^20 - 21 = 485165174; d = -200: e^-200 + 200 - 1 = 199.
    torch.testing.assert_close(estimate, tensor([485165174.0, 199.0]))
    estimate.sum().backward()
    # Held at the limit on one side; on the other still pulled back towards the reference.
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [0.0, 1.0]


def test_an_unknown_estimator_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'low_var'.*did you mean low_var_kl\?"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var")


@pytest.mark.parametrize(
    ("kind", "slope"),
    [
        # By log_prob, at log_prob - ref_log_prob = ln 2:
        ("k1", 1.0),
        ("abs", 1.0),
        ("k2", 0.693147),  # the difference itself
        ("k3", 0.5),  # 1 - e^d = 1 - 1/2
    ],
)
def test_gradients_by_the_policy_hand_computed(kind, slope) -> None:
    log_prob = tensor([math.log(0.5)]).requires_grad_()
    kl_penalty(log_prob, tensor([math.log(0.25)]), kind).sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "values", "slopes"),
    [
        ("k1", [0.5, -2.7, 0.0], [1.0, 1.0, 1.0]),
        ("abs", [0.5, 2.7, 0.0], [1.0, -1.0, 0.0]),
        ("k2", [0.125, 3.645, 0.0], [0.5, -2.7, 0.0]),
        # Nothing holds e^2.7 - 3.7 = 11.179732 at 10: the token that drifted most keeps its gradient, 1 - e^2.7.
        ("k3", [0.106531, 11.179732, 0.0], [0.393469, -13.879732, 0.0]),
        ("k1+", [0.5, -2.7, 0.0], [0.5, -2.7, 0.0]),
        ("abs+", [0.5, 2.7, 0.0], [0.5, -2.7, 0.0]),
        ("k2+", [0.125, 3.645, 0.0], [0.5, -2.7, 0.0]),
        ("k3+", [0.106531, 11.179732, 0.0], [0.5, -2.7, 0.0]),
    ],
)
def test_a_kind_with_plus_has_its_own_value_and_the_gradient_of_k2(kind, values, slopes) -> None:
    log_prob = tensor([-1.0, -3.0, -0.5]).requires_grad_()
    loss = kl_loss(log_prob, tensor([-1.5, -0.3, -0.5]), kind)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), tensor(values), rtol=0, atol=1e-5)
    torch.testing.assert_close(log_prob.grad, tensor(slopes), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_without_plus_and_without_the_old_policy_the_loss_is_the_estimate(kind) -> None:
    log_prob, ref_log_prob = tensor([-1.0, -2.0]), tensor([-1.5, -0.5])
    assert torch.equal(kl_loss(log_prob, ref_log_prob, kind), kl_penalty(log_prob, ref_log_prob, kind))


def _mean_gradient(kind: str, *, off_policy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the tokens that a policy samples of the gradient of their KL losses, and the gradient of the KL."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits, old_logits = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    log_prob, ref_log_prob, old_log_prob = (x.log_softmax(-1) for x in (logits, ref_logits, old_logits))
    sampled_by = old_log_prob if off_policy else log_prob.detach()
    loss = kl_loss(log_prob, ref_log_prob, kind, old_log_prob if off_policy else None)
    (found,) = torch.autograd.grad((sampled_by.exp() * loss).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((log_prob.exp() * (log_prob - ref_log_prob)).sum(), logits)
    return found, exact


@pytest.mark.parametrize("kind", ["k2", "k1+", "abs+", "k2+", "low_var_kl+"])
def test_the_mean_gradient_of_a_kind_with_plus_is_that_of_the_kl_on_policy(kind) -> None:
    assert_equal(*_mean_gradient(kind, off_policy=False))


@pytest.mark.parametrize("kind", ["k1", "abs", "k3"])
def test_the_mean_gradient_of_the_others_is_another(kind) -> None:
    found, exact = _mean_gradient(kind, off_policy=False)
    assert (found - exact).abs().max() > 0.05


@pytest.mark.parametrize("kind", KL_LOSS_KINDS)
def test_with_the_old_policy_the_mean_gradient_is_that_of_the_kl_off_policy_too(kind) -> None:
    assert_equal(*_mean_gradient(kind, off_policy=True))


def test_with_the_old_policy_k3_is_the_ratio_times_k3_with_a_gradient_through_the_ratio() -> None:
    results = []
    for through_ratio in (True, False):
        log_prob = tensor([-1.0, -3.0, -0.5]).requires_grad_()
        ref_log_prob, old_log_prob = tensor([-1.5, -2.0, -0.5]), tensor([-1.2, -2.5, -30.0])
        ratio = (log_prob - old_log_prob).clamp(max=20).exp()
        loss = (
            ratio * kl_penalty(log_prob, ref_log_prob, "k3")
            if through_ratio
            else kl_loss(log_prob, ref_log_prob, "k3", old_log_prob)
        )
        loss.sum().backward()
        results += [(loss.detach(), log_prob.grad)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_an_unknown_kl_loss_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"kl_loss_type='k4\+'.*k3\+"):
        kl_loss(torch.zeros(1), torch.zeros(1), "k4+")


def test_the_coefficient_moves_by_the_share_of_the_batch_in_the_horizon() -> None:
    controller = AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=10000)
    controller.update(0.15, n_steps=1024)
    assert controller.value == pytest.approx(0.00102048, rel=1e-9)


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        # horizon 100, 10 sequences: the coefficient moves by error / 10.
        (6.0, 0.2),  # on target
        (6.6, 0.2 * 1.01),  # error 0.1
        (60.0, 0.2 * 1.02),  # error 9, limited to 0.2
        (5.4, 0.2 * 0.99),  # error -0.1
        (-3.0, 0.2 * 0.98),  # error -1.5, limited to -0.2
    ],
)
def test_the_adaptive_coefficient_moves_towards_the_target(current_kl, expected) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=100)
    controller.update(current_kl, n_steps=10)
    assert controller.value == pytest.approx(expected)


def test_the_adaptive_coefficient_goes_on_from_a_checkpoint() -> None:
    controller = make_kl_controller("adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    controller.update(12.0, n_steps=10)
    resumed = make_kl_controller("adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(3.0, n_steps=10)
    assert resumed.value == controller.value == pytest.approx(0.2 * 1.02 * 0.98)


def test_the_fixed_coefficient_stays_and_the_configured_one_counts_on_resume() -> None:
    controller = make_kl_controller("fixed", kl_coef=0.05, target_kl=6.0, horizon=100)
    controller.update(1000.0, n_steps=1000)
    assert controller.value == 0.05
    controller.load_state_dict(FixedKLController(0.7).state_dict())
    assert controller.value == 0.05


@pytest.mark.parametrize("current_kl", [math.nan, math.inf])
def test_a_non_finite_kl_is_an_error_and_leaves_the_coefficient(current_kl) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=100)
    with pytest.raises(NonFiniteError, match=r"coefficient \(now 0.2\)"):
        controller.update(current_kl, n_steps=10)
    assert controller.value == 0.2


def test_an_adaptive_controller_that_could_not_move_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        make_kl_controller("adaptive", kl_coef=0.0, target_kl=-1.0, horizon=0)
    for key in ("kl_coef is 0.0", "target_kl is -1.0", "horizon is 0"):
        assert f"algorithm.kl_ctrl.{key}" in str(error.value)


def test_an_unknown_controller_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'adaptiv'.*did you mean adaptive\?"):
        make_kl_controller("adaptiv", kl_coef=0.1, target_kl=1.0, horizon=1)


def test_every_estimator_that_the_configuration_offers_is_there() -> None:
    for kind in KL_KINDS:
        assert kl_penalty(torch.zeros(1), torch.zeros(1), kind).item() == 0.0
