"""What a training backend can't do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from paceline.catalog import BACKENDS
from paceline.config import PPOConfig
from paceline.config.derived import uses_reference
from paceline.config.keys import ACTOR, MODEL, known_keys, value_of


def check_backends(cfg: PPOConfig, use_critic: bool, device: str | None) -> Iterator[str]:
    """What the chosen backends can't do."""
    sections = [ACTOR, *(["critic"] if use_critic else []), *(["reward_model"] if cfg.reward_model.enable else [])]
    for section in sections:
        strategy = value_of(cfg, f"{section}.strategy")
        model = MODEL if section == ACTOR else f"{section}.model"
        backend = BACKENDS.get(strategy)
        if backend is None:
            continue
        if backend.package is not None and importlib.util.find_spec(backend.package) is None:
            yield (
                f"{section}.strategy={strategy} needs a package that is not installed here. `make backend-{strategy}` "
                f"makes an environment that has it: run paceline from .backends/{strategy}/bin, or set "
                f"{section}.strategy=fsdp2."
            )
        if not backend.packing and value_of(cfg, f"{model}.use_remove_padding"):
            yield (
                f"{model}.use_remove_padding=True: {section}.strategy={strategy} does not pack sequences. Set it to "
                f"False, or {section}.strategy to fsdp2 or veomni."
            )
        dtype = value_of(cfg, f"{model}.compute_dtype")
        if dtype != "float32" and not backend.bfloat16:
            yield (
                f"{model}.compute_dtype={dtype}: {section}.strategy={strategy} computes in float32. "
                f"Set it to that, or {section}.strategy=fsdp2."
            )
        offload = [f"{section if section == ACTOR else model}.fsdp_config."]
        if section == ACTOR and uses_reference(cfg):
            offload.append("actor_rollout_ref.ref.fsdp_config.")
        for key in known_keys():
            if not backend.offload and key.startswith(tuple(offload)) and value_of(cfg, key):
                yield (
                    f"{key}=True: {section}.strategy={strategy} does not offload. Set it to False, or "
                    f"{section}.strategy=fsdp2."
                )
        recomputes = section != "reward_model" and value_of(cfg, f"{model}.enable_gradient_checkpointing")
        if not backend.recomputes_on_cpu and device == "cpu" and recomputes:
            yield (
                f"{model}.enable_gradient_checkpointing=True: {section}.strategy={strategy} does not recompute "
                "activations on a CPU. Set it to False."
            )


def check_tensor_parallelism(
    cfg: PPOConfig, strategies: list[tuple[str, str, str]], pools: dict[str, list[int]]
) -> Iterator[str]:
    megatron: dict[str, tuple[str, int]] = {}
    for section, strategy, pool in strategies:
        for name in (name for name, backend in BACKENDS.built_in.items() if backend.tensor_parallel):
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
