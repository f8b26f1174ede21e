"""What a training backend can't do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.checks.key_checks import OPTIONAL_BACKENDS, TENSOR_PARALLEL
from paceline.config.keys import ACTOR, MODEL, known_keys, value_of


def check_backends(cfg: PPOConfig, use_critic: bool, device: str | None) -> Iterator[str]:
    """What the backends of optional packages can't do."""
    sections = [ACTOR, *(["critic"] if use_critic else []), *(["reward_model"] if cfg.reward_model.enable else [])]
    for section in sections:
        strategy = value_of(cfg, f"{section}.strategy")
        model = MODEL if section == ACTOR else f"{section}.model"
        if strategy not in OPTIONAL_BACKENDS:
            continue
        if importlib.util.find_spec(strategy) is None:
            yield (
                f"{section}.strategy={strategy} needs a package that is not installed here. `make backend-{strategy}` "
                f"makes an environment that has it: run paceline from .backends/{strategy}/bin, or set "
                f"{section}.strategy=fsdp2."
            )
        if strategy in TENSOR_PARALLEL and value_of(cfg, f"{model}.use_remove_padding"):
            yield (
                f"{model}.use_remove_padding=True: {section}.strategy={strategy} does not pack sequences. Set it to "
                f"False, or {section}.strategy to fsdp2 or veomni."
            )
        if (dtype := value_of(cfg, f"{model}.compute_dtype")) != "float32":
            yield (
                f"{model}.compute_dtype={dtype}: {section}.strategy={strategy} computes "
                f"in float32. Set it to that, or {section}.strategy=fsdp2."
            )
        offload = [f"{section if section == ACTOR else model}.fsdp_config."]
        if section == ACTOR and (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward):
            offload.append("actor_rollout_ref.ref.fsdp_config.")
        for key in known_keys():
            if key.startswith(tuple(offload)) and value_of(cfg, key):
                yield (
                    f"{key}=True: {section}.strategy={strategy} does not offload. Set it to False, or "
                    f"{section}.strategy=fsdp2."
                )
        recomputes = section != "reward_model" and value_of(cfg, f"{model}.enable_gradient_checkpointing")
        if strategy == "megatron" and device == "cpu" and recomputes:
            yield (
                f"{model}.enable_gradient_checkpointing=True: {section}.strategy=megatron does not recompute "
                "activations on a CPU. Set it to False."
            )


def check_tensor_parallelism(
    cfg: PPOConfig, strategies: list[tuple[str, str, str]], pools: dict[str, list[int]]
) -> Iterator[str]:
    megatron: dict[str, tuple[str, int]] = {}
    for section, strategy, pool in strategies:
        for name in TENSOR_PARALLEL:
            key = f"{section}.{name}.tensor_model_parallel_size"
            size = value_of(cfg, key)
            if size > 1 and strategy != name:
                yield f"{key}={size} is for {section}.strategy={name}, which is {strategy}. Leave it out."
            elif strategy == name and sum(pools[pool]) % size:
                yield f"{key}={size} does not divide the {sum(pools[pool])} devices of {pool}. Set it to a divisor."
        if strategy == "megatron":
            size = value_of(cfg, f"{section}.megatron.tensor_model_parallel_size")
            other, known = megatron.setdefault(pool, (section, size))
            if size != known:
                yield (
                    f"{section}.megatron.tensor_model_parallel_size={size}, but that of {other} on the same devices is "
                    f"{known}, and megatron has one size per process. Set the same for both, or "
                    "trainer.placement.name=split."
                )
