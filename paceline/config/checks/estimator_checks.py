"""What an estimator reads that the rest of the configuration must give."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.derived import estimator_in_use
from paceline.config.keys import ACTOR, ROLLOUT


def check_estimator(cfg: PPOConfig) -> Iterator[str]:
    """Settings that the estimator lacks, or has no use for."""
    algorithm = cfg.algorithm
    chosen = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    needs = estimator_in_use(cfg)
    if needs is None:  # check_choices reports one that nobody knows
        return
    yield from _check_components(cfg, chosen) if needs.needs_components else _check_no_components(cfg, chosen)
    savings = {
        f"{ROLLOUT}.trust_log_probs": cfg.actor_rollout_ref.rollout.trust_log_probs,
        "algorithm.rollout_correction.bypass_mode": algorithm.rollout_correction.bypass_mode,
    }
    asked = chosen if needs.needs_sum_pi_squared else f"{ACTOR}.calculate_sum_pi_squared=True"
    for key, saves in savings.items():
        if saves and (needs.needs_sum_pi_squared or cfg.actor_rollout_ref.actor.calculate_sum_pi_squared):
            yield (
                f"{key}=True with {asked}: the squared probabilities come from the pass that it saves. Set {key}=False."
            )
    if not needs.needs_critic:
        settings = {
            "algorithm.lam_critic": algorithm.lam_critic,
            "algorithm.lam_length_alpha": algorithm.lam_length_alpha,
            "algorithm.use_pf_ppo": algorithm.use_pf_ppo or None,
        }
        for key, value in settings.items():
            if value is not None:
                yield f"{key}={value} with {chosen}, which has no critic. Leave it out, or set that to gae."
    if cfg.actor_rollout_ref.actor.unbiased_kl_loss and not cfg.actor_rollout_ref.actor.use_kl_loss:
        yield f"{ACTOR}.unbiased_kl_loss=True without a KL loss; set {ACTOR}.use_kl_loss=True, or leave it out."
    if algorithm.filter_groups.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=True: groups are compared "
            "before the KL is known, and with it no two responses would be equal. Set seq_reward, or acc."
        )


def _check_components(cfg: PPOConfig, chosen: str) -> Iterator[str]:
    algorithm = cfg.algorithm
    keys, weights = algorithm.gdpo_reward_keys or [], algorithm.gdpo_reward_weights
    if not keys or not all(keys) or len(set(keys)) < len(keys):
        yield (
            f"algorithm.gdpo_reward_keys={keys} with {chosen}, which compares parts of the score. Name each once, as "
            "the reward function's dict does, such as [accuracy,format]."
        )
    if weights is not None and (len(weights) != len(keys) or not any(weights)):
        yield (
            f"algorithm.gdpo_reward_weights={weights} for algorithm.gdpo_reward_keys={keys}: set one weight for each, "
            "not all of them 0, or leave it out for 1 each."
        )
    if algorithm.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward=True with {chosen}, which reads the parts of the score and not the rewards: "
            f"the KL would have no effect. Set {ACTOR}.use_kl_loss=True instead."
        )
    added = {
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable": (
            cfg.reward_model.reward_kwargs.overlong_buffer_cfg.enable,
            "overlong_penalty",
        ),
        "reward_model.enable": (cfg.reward_model.enable, "model_score"),
    }
    for key, (is_on, part) in added.items():
        if is_on and keys and not {part, "score"} & set(keys):
            yield (
                f"{key}=True with {chosen}: what it adds to the score is none of algorithm.gdpo_reward_keys={keys}, so "
                f"it would have no effect. Add {part} to them."
            )


def _check_no_components(cfg: PPOConfig, chosen: str) -> Iterator[str]:
    for name in ("gdpo_reward_keys", "gdpo_reward_weights"):
        value = getattr(cfg.algorithm, name)
        if value is not None:
            yield f"algorithm.{name}={value} has no part in {chosen}. Leave it out, or set that to gdpo."
