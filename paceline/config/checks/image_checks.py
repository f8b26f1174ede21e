"""What runs on prompts with images can't do yet."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.derived import uses_critic
from paceline.config.keys import ACTOR, MODEL, ROLLOUT

IMAGE_STRATEGIES = ("local", "fsdp2")


def check_images(cfg: PPOConfig) -> Iterator[str]:
    """Each setting that does not go with data.image_key, with what to set."""
    if cfg.data.image_key is None:
        return
    chosen = f"data.image_key={cfg.data.image_key}"
    rollout, actor, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
    if rollout.name != "hf":
        yield f"{ROLLOUT}.name={rollout.name} with {chosen}: it samples from prompts of text. Set it to hf."
    if actor.strategy not in (None, *IMAGE_STRATEGIES):
        yield (
            f"{ACTOR}.strategy={actor.strategy} with {chosen}: it trains models of text. Set it to "
            f"{' or '.join(IMAGE_STRATEGIES)}."
        )
    if cfg.data.truncation != "error" and not cfg.data.filter_overlong_prompts:
        yield (
            f"data.truncation={cfg.data.truncation} with {chosen}: images can't be cut. Set it to error, or "
            "data.filter_overlong_prompts=True."
        )
    if uses_critic(cfg):
        yield (
            f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} with {chosen}: a critic reads text. Set one "
            "without a critic, such as grpo."
        )
    if cfg.reward_model.enable:
        yield f"reward_model.enable=True with {chosen}: a reward model reads text. Set custom_reward_function.path."
    untried = {
        "distillation.enabled": cfg.distillation.enabled,
        f"{MODEL}.lora_rank": model.lora_rank,
        f"{MODEL}.use_torch_compile": model.use_torch_compile,
        f"{ACTOR}.ulysses_sequence_parallel_size": actor.ulysses_sequence_parallel_size - 1,
    }
    for key, value in untried.items():
        if value:
            yield f"{key} with {chosen} is not supported yet. Leave it out."
