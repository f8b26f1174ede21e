"""KL divergence of the policy from the reference: estimators for reward or loss, and the coefficient in the reward.

All estimators are per token and of KL(policy || reference), from log-probs of tokens that the policy sampled.
"""

from __future__ import annotations

import math
from typing import Protocol, get_args

import torch

from paceline.catalog import KLKind, KLLossKind
from paceline.errors import ConfigError, NonFiniteError
from paceline.text import unknown_choice

KL_KINDS = get_args(KLKind)
KL_LOSS_KINDS = get_args(KLLossKind)

MAX_EXPONENT = 20.0
"""Largest exponent that k3 and an importance ratio take: e^20 is about 5e8, e^89 is infinite in float32."""


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """An estimate of the KL divergence for each token (J. Schulman, "Approximating KL Divergence", 2020).

    With d = ref_log_prob - log_prob:

    - ``kl`` or ``k1``: -d. Unbiased, of either sign, high variance.
    - ``abs``: |d|.
    - ``mse`` or ``k2``: d^2 / 2. Biased, low variance; its gradient is an unbiased one of the KL.
    - ``low_var_kl`` or ``k3``: e^d - d - 1. Unbiased, never negative, low variance. Here d is limited to at most 20,
      where the estimate stays at about 5e8 with gradient 0; it needs no lower limit, being linear there.
    """
    if kind in ("kl", "k1"):
        return log_prob - ref_log_prob
    if kind == "abs":
        return (log_prob - ref_log_prob).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (log_prob - ref_log_prob).square()
    if kind in ("low_var_kl", "k3"):
        d = (ref_log_prob - log_prob).clamp(max=MAX_EXPONENT)
        # expm1(d) - d and not exp(d) - 1 - d, which in float32 is all rounding error where d is below 1e-3.
        return torch.expm1(d) - d
    raise ConfigError(unknown_choice("kl_penalty or kl_loss_type", kind, sorted(KL_KINDS)))


def kl_loss(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str, old_log_prob: torch.Tensor | None = None
) -> torch.Tensor:
    """An estimate for each token, to be minimised: `kl_penalty`, or for a kind with "+" another gradient for it.

    ``k3+``, and so on: the value of k3 with the gradient of k2, (log_prob - ref_log_prob) * grad log_prob. On policy
    its mean is the gradient of the KL, which that of k1, abs and k3 is not.

    With `old_log_prob`, that of the policy that sampled: value and gradient are those of the "+" kind, times the ratio
    e^(log_prob - old_log_prob), its logarithm limited to ±20. Then the mean of the gradient is that of the KL off
    policy, too. For k3 this is the gradient of ratio * k3, as in DeepSeek-V3.2.
    """
    if kind not in KL_LOSS_KINDS:
        raise ConfigError(unknown_choice("kl_loss_type", kind, sorted(KL_LOSS_KINDS)))
    value = kl_penalty(log_prob, ref_log_prob, kind.removesuffix("+"))
    if not kind.endswith("+") and old_log_prob is None:
        return value
    k2 = kl_penalty(log_prob, ref_log_prob, "k2")
    straight_through = value.detach() + (k2 - k2.detach())  # the bracket is 0, with the gradient of k2
    if old_log_prob is None:
        return straight_through
    log_ratio = (log_prob.detach() - old_log_prob).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return log_ratio.exp() * straight_through


class KLController(Protocol):
    """The coefficient of the KL penalty in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of the KL that a batch of `n_steps` sequences had."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A coefficient that stays. On resume the configured one counts, not the checkpoint's."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load: see the class."""


class AdaptiveKLController:
    """A coefficient that follows a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    error = clip(current_kl / target_kl - 1, -0.2, 0.2); value <- value * (1 + error * n_steps / horizon).
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        given = {"kl_coef": init_kl_coef, "target_kl": target_kl, "horizon": horizon}
        problems = [
            f"algorithm.kl_ctrl.{name} is {value}; with that the adaptive controller can't move. Set it above 0."
            for name, value in given.items()
            if not value > 0
        ]
        if problems:
            raise ConfigError(problems)
        self.value = init_kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a batch of `n_steps` sequences; `current_kl` is measured as the target is."""
        if not math.isfinite(current_kl):
            raise NonFiniteError(
                f"The KL divergence from the reference is {current_kl}; the KL coefficient (now {self.value}) can't "
                "follow it. Look for non-finite old_log_probs or ref_log_prob."
            )
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def make_kl_controller(type: str, kl_coef: float, target_kl: float, horizon: int) -> KLController:
    """The controller that `algorithm.kl_ctrl` describes: fixed or adaptive."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(unknown_choice("algorithm.kl_ctrl.type", type, ("adaptive", "fixed")))
