"""Advantages and the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.config.common import KLKind


@dataclass(frozen=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward moves."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: the coefficient follows target_kl."""
    kl_coef: float = 0.001
    """Coefficient, or its start value; >= 0."""
    target_kl: float = 0.1
    """KL per token (mean over responses) that the adaptive controller aims at, > 0."""
    horizon: int = 10000
    """Samples over which the adaptive controller reacts, >= 1."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """Name of a registered estimator: gae (with a critic) or grpo (group-relative, without)."""
    gamma: float = 1.0
    """Discount, in [0, 1]."""
    lam: float = 1.0
    """GAE's lambda, in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation; False is Dr.GRPO's way."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from the token rewards (PPO's way)."""
    kl_penalty: KLKind = "kl"
    """Estimator of that KL. k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its coefficient."""
