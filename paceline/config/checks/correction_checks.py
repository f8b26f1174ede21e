"""Policy losses and rollout correction: what the rest of the configuration does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.keys import ACTOR, ROLLOUT
from paceline.config.thresholds import Bounds, read_bounds, read_rejections
from paceline.errors import ConfigError

CORRECTION = "algorithm.rollout_correction"


def check_policy_loss(cfg: PPOConfig) -> Iterator[str]:
    """Losses that want a setting, or that another one takes the place of."""
    policy_loss, correction = cfg.actor_rollout_ref.actor.policy_loss, cfg.algorithm.rollout_correction
    loss = f"{ACTOR}.policy_loss.loss_mode={policy_loss.loss_mode}"
    if policy_loss.loss_mode == "dro" and policy_loss.dro_beta is None:
        yield f"{loss} wants the strength of its pull to the old policy. Set {ACTOR}.policy_loss.dro_beta, such as 0.1."
    if not policy_loss.clip_cov_lb < policy_loss.clip_cov_ub:
        yield (
            f"{ACTOR}.policy_loss.clip_cov_lb={policy_loss.clip_cov_lb} is not below clip_cov_ub="
            f"{policy_loss.clip_cov_ub}, so no token has a covariance between them. Lower it, or raise clip_cov_ub."
        )
    if policy_loss.loss_mode == "bypass_mode" and not correction.bypass_mode:
        yield f"{loss} without {CORRECTION}.bypass_mode=True, which turns it on. Set both, or loss_mode=vanilla."
    replaced = correction.bypass_mode and correction.loss_type == "reinforce"
    if replaced and policy_loss.loss_mode not in ("vanilla", "bypass_mode"):
        yield (
            f"{loss} with {CORRECTION}.loss_type=reinforce, which is a loss of its own. Set loss_mode=vanilla, or "
            f"{CORRECTION}.loss_type=ppo_clip for {policy_loss.loss_mode} with the rollout's log-probs as the old ones."
        )


def check_correction(cfg: PPOConfig) -> Iterator[str]:
    """Thresholds that can't be read, and corrections that contradict each other."""
    section, actor, rollout = (
        cfg.algorithm.rollout_correction,
        cfg.actor_rollout_ref.actor,
        cfg.actor_rollout_ref.rollout,
    )
    bounds: Bounds | None = None
    try:
        bounds = read_bounds(section.rollout_is_threshold)
    except ConfigError as error:
        yield f"{CORRECTION}.rollout_is_threshold={error.problems[0]}"
    try:
        read_rejections(section.rollout_rs, section.rollout_rs_threshold)
    except ConfigError as error:
        yield f"{CORRECTION}.rollout_rs_threshold: {error.problems[0]}"
    cap = actor.tis_imp_ratio_cap
    same = section.rollout_is is None or (section.rollout_is == "token" and bounds in (None, (None, cap)))
    if cap > 0 and (section.bypass_mode or not same):
        yield (
            f"{ACTOR}.tis_imp_ratio_cap={cap} means {CORRECTION}.rollout_is=token with rollout_is_threshold={cap} and "
            f"no bypass_mode, and that section says otherwise. Set one of them alone."
        )
    corrects = section.rollout_is is not None or section.rollout_rs is not None
    what = f"{ACTOR}.tis_imp_ratio_cap={cap}" if cap > 0 else f"a correction ({CORRECTION})"
    if rollout.trust_log_probs and not section.bypass_mode and (cap > 0 or corrects):
        yield (
            f"{ROLLOUT}.trust_log_probs=True with {what}: the correction compares the "
            f"engine's log-probs with the actor's, which are then not computed. Set one of them alone."
        )
    if section.bypass_mode and not rollout.do_sample:
        yield (
            f"{CORRECTION}.bypass_mode=True with {ROLLOUT}.do_sample=False: greedy decoding reports log-probs at "
            f"temperature 1, the actor's are at {ROLLOUT}.temperature. Set {CORRECTION}.bypass_mode=False."
        )
