"""Models and tokenizers that can't be loaded, and LoRA where nothing can train it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.catalog import BACKENDS
from paceline.config import PPOConfig, RewardModelModelConfig
from paceline.config.derived import uses_reference
from paceline.config.keys import ACTOR, MODEL
from paceline.config.path_checks import model_problems, tokenizer_problems
from paceline.config.pools import device_pools, rollout_pools
from paceline.errors import ConfigError


def check_models(cfg: PPOConfig, use_critic: bool) -> Iterator[str]:
    model = cfg.actor_rollout_ref.model
    if model.path is None:
        yield "actor_rollout_ref.model.path is not set; set it to a folder of a Hugging Face model or a hub id."
    else:
        problems = list(model_problems("actor_rollout_ref.model.path", model.path))
        yield from problems
        if not problems and model.tokenizer_path is None:
            yield from tokenizer_problems("actor_rollout_ref.model.path", model.path)
    if model.tokenizer_path is not None:
        yield from tokenizer_problems("actor_rollout_ref.model.tokenizer_path", model.tokenizer_path)
    if use_critic and cfg.critic.model.path is not None:
        yield from model_problems("critic.model.path", cfg.critic.model.path)
    if cfg.reward_model.enable:
        yield from _check_reward_model(cfg.reward_model.model)


def _check_reward_model(model: RewardModelModelConfig) -> Iterator[str]:
    if model.path is None:
        yield (
            "reward_model.model.path is not set, but reward_model.enable=True; set it to a folder of a Hugging Face "
            "model or a hub id."
        )
    else:
        problems = list(model_problems("reward_model.model.path", model.path))
        yield from problems
        if not problems and model.tokenizer_path is None:
            yield from tokenizer_problems("reward_model.model.path", model.path)
    for key, path in (("tokenizer_path", model.tokenizer_path), ("input_tokenizer", model.input_tokenizer)):
        if path is not None:
            yield from tokenizer_problems(f"reward_model.model.{key}", path)


def check_lora(cfg: PPOConfig) -> Iterator[str]:
    model, strategy = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.actor.strategy
    if model.lora_rank < 1:
        return
    backend = BACKENDS.get(strategy)
    if backend is not None and not backend.lora:
        with_lora = [name for name, entry in BACKENDS.built_in.items() if entry.lora]
        yield (
            f"{MODEL}.lora_rank={model.lora_rank} with {ACTOR}.strategy={strategy}, which has no LoRA. Set "
            f"{ACTOR}.strategy to {' or '.join(with_lora)}, or lora_rank to 0."
        )
    try:
        actor_pool, generating = next(iter(device_pools(cfg.trainer))), rollout_pools(cfg.trainer)
    except ConfigError:  # told elsewhere
        actor_pool, generating = "", [""]
    if uses_reference(cfg) and actor_pool not in generating:
        yield (
            f"{MODEL}.lora_rank={model.lora_rank} with a KL term: actor and reference are one model, which "
            f"also generates. Set trainer.placement.rollout_on=[{','.join([actor_pool, *generating])}]."
        )
    if not model.target_modules or not all(model.target_modules):
        yield (
            f"{MODEL}.target_modules={model.target_modules!r} names no layers; set it to all-linear or to names such "
            "as [q_proj, v_proj]."
        )
