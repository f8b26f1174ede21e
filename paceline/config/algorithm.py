"""Advantages and the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.config.common import KLKind
from paceline.config.field_rules import Count, CountOrAll, NotNegative, Positive, Share


@dataclass(frozen=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward moves."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: the coefficient follows target_kl."""
    kl_coef: NotNegative = 0.001
    """Coefficient, or its start value; >= 0."""
    target_kl: Positive = 0.1
    """KL per token (mean over responses) that the adaptive controller aims at, > 0."""
    horizon: Count = 10000
    """Samples over which the adaptive controller reacts, >= 1."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: train only on prompts whose responses differ in score."""

    enable: bool = False
    """Leave out groups whose responses all have the same score, and generate for more prompts until the batch is full.
    Needs rollout.n of 2 or more."""
    metric: str = "seq_reward"
    """What is compared: seq_reward (the sum of a response's scores), or a field that the reward function returns, such
    as acc."""
    max_num_gen_batches: CountOrAll = 10
    """Batches of prompts that may be generated to fill one, >= 1, or -1: no limit. After them a step has to do with
    what was found."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """Name of a registered estimator: gae (with a critic); grpo, rloo, reinforce_plus_plus_baseline (compare the
    responses to a prompt); reinforce_plus_plus (normalises over the batch); remax (compares with a greedy response)."""
    gamma: Share = 1.0
    """Discount of gae and reinforce_plus_plus, in [0, 1]."""
    lam: Share = 1.0
    """GAE's lambda, in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation; False is Dr.GRPO's way."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from the token rewards (PPO's way)."""
    kl_penalty: KLKind = "kl"
    """Estimator of that KL. k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its coefficient."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Which groups are trained on."""
