"""Estimators that the rest of the configuration does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.checks.key_checks import KnownNames
from paceline.config.keys import ROLLOUT


def check_algorithm(cfg: PPOConfig, known: KnownNames, use_critic: bool) -> Iterator[str]:
    estimator = cfg.algorithm.adv_estimator
    if estimator in known.group_estimators and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n=1 with algorithm.adv_estimator={estimator}: a response is compared with others to the same "
            f"prompt, and alone its advantage is 0. Set {ROLLOUT}.n to 2 or more."
        )
    elif cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1: a response alone has no other score to differ "
            f"from, so every group would be left out. Set {ROLLOUT}.n to 2 or more."
        )
    if cfg.algorithm.filter_groups.enable and estimator in known.baseline_estimators:
        yield (
            f"algorithm.filter_groups.enable=True with algorithm.adv_estimator={estimator}: its baselines belong to "
            "the prompts that were drawn first. Set algorithm.filter_groups.enable=False or another estimator."
        )
    if cfg.algorithm.kl_ctrl.type == "adaptive" and cfg.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.kl_ctrl.type=adaptive: the controller multiplies it, so it "
            "would stay 0. Set it above 0, or algorithm.kl_ctrl.type=fixed."
        )
    if cfg.trainer.critic_warmup > 0 and estimator in known.adv_estimators and not use_critic:
        yield (
            f"trainer.critic_warmup={cfg.trainer.critic_warmup} with algorithm.adv_estimator={estimator}, which has "
            "no critic. Set trainer.critic_warmup=0 or algorithm.adv_estimator=gae."
        )
