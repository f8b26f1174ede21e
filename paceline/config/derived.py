"""What follows from several sections: those that leave something open (null) completed, and which roles a run has."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import CriticConfig, PPOConfig, RewardModelConfig


def uses_reference(config: PPOConfig) -> bool:
    """Whether a KL term needs the reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def critic_config(config: PPOConfig) -> CriticConfig:
    """The critic's section, completed from the actor's."""
    critic, policy = config.critic, config.actor_rollout_ref
    return replace(
        critic,
        ppo_mini_batch_size=critic.ppo_mini_batch_size or policy.actor.ppo_mini_batch_size,
        ppo_epochs=critic.ppo_epochs or policy.actor.ppo_epochs,
        use_dynamic_bsz=_or(critic.use_dynamic_bsz, policy.actor.use_dynamic_bsz),
        model=replace(critic.model, path=critic.model.path or policy.model.path),
    )


def reward_model_config(config: PPOConfig) -> RewardModelConfig:
    """The reward model's section, with the policy's tokenizer as that of its inputs unless another is named."""
    section, policy = config.reward_model, config.actor_rollout_ref
    tokenizer = section.model.input_tokenizer or policy.model.tokenizer_path or policy.model.path
    return replace(
        section,
        use_dynamic_bsz=_or(section.use_dynamic_bsz, policy.actor.use_dynamic_bsz),
        model=replace(section.model, input_tokenizer=tokenizer),
    )


def _or(own: bool | None, other: bool) -> bool:
    return other if own is None else own
