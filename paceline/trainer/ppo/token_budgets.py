"""How many tokens go through a model at one time where the configuration leaves that open.

So many that a pass is as fast per token as it gets, and fewer where their activations would take too much of the
memory. Nothing that changes from hour to hour has a part in it, as free memory would: the budget decides which rows are
added up first, so the same run must get the same one. Nor do devices that the role does not use, so that it is the same
in every placement.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import ModelConfig, PPOConfig, TrainedModelConfig
from paceline.config.derived import reward_model_pool, role_pools, teacher_models, teacher_pool
from paceline.trainer.ppo.model_size import Head, available_memory, read_model_size

CPU_TOKENS, ACCELERATOR_TOKENS = 4096, 16384
"""More tokens in a pass are hardly faster per token."""
MEMORY_SHARE = 1 / 4
"""Of a node's or an accelerator's memory, for the activations of one role."""
UNKNOWN_ROWS = 8
"""Full-length responses of a pass through a model whose size can't be read here."""


def with_token_budgets(cfg: PPOConfig) -> PPOConfig:
    """The same with a budget of tokens for the actor, the critic and the models that score; what is set stays."""
    policy, critic, scorer, distillation = cfg.actor_rollout_ref, cfg.critic, cfg.reward_model, cfg.distillation
    actor_pool, critic_pool = role_pools(cfg.trainer)
    teachers = [
        token_budget(cfg, model, "language", teacher_pool(cfg) or critic_pool) for model in teacher_models(cfg).values()
    ]
    backbone = critic.model if critic.model.path else replace(critic.model, path=policy.model.path)
    actor = replace(
        policy.actor,
        ppo_max_token_len_per_gpu=policy.actor.ppo_max_token_len_per_gpu
        or token_budget(cfg, policy.model, "language", actor_pool),
    )
    return replace(
        cfg,
        actor_rollout_ref=replace(policy, actor=actor),
        critic=replace(
            critic,
            ppo_max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu
            or token_budget(cfg, backbone, "value", critic_pool),
        ),
        reward_model=replace(
            scorer,
            forward_max_token_len_per_gpu=scorer.forward_max_token_len_per_gpu
            or token_budget(cfg, scorer.model, "score", reward_model_pool(cfg) or critic_pool),
        ),
        distillation=replace(
            distillation,
            forward_max_token_len_per_gpu=distillation.forward_max_token_len_per_gpu or min(teachers, default=None),
        ),
    )


def token_budget(cfg: PPOConfig, model: ModelConfig, head: Head, pool: list[int]) -> int:
    """Tokens of a pass on one device of a role whose pool has so many devices on its nodes.

    A response of full length always fits: longer than the budget it would go alone.
    """
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    device = cfg.trainer.device or "cpu"
    tokens = CPU_TOKENS if device == "cpu" else ACCELERATOR_TOKENS
    size, memory = read_model_size(model), available_memory(device)
    if size is None or memory is None:
        return max(longest, min(tokens, UNKNOWN_ROWS * longest))
    size = size.with_head(head)
    checkpointing = isinstance(model, TrainedModelConfig) and model.enable_gradient_checkpointing
    share = memory * MEMORY_SHARE / (max(pool) if device == "cpu" else 1)
    while tokens > longest and size.activation_bytes(tokens, checkpointing=checkpointing, head=head) > share:
        tokens //= 2
    return max(longest, tokens)
