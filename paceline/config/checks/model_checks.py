"""Models and tokenizers that can't be loaded, and what the chosen training backends can't do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from paceline.catalog import BACKENDS
from paceline.config import AnyRunConfig, PolicyModelConfig, PPOConfig, RewardModelModelConfig
from paceline.config.backend_limits import BFLOAT16, COMPILES, LORA, OFFLOAD, PACKING, ULYSSES, refusals
from paceline.config.derived import device_pools, rollout_pools, uses_critic, uses_reference
from paceline.config.keys import ACTOR, MODEL, known_keys, value_of
from paceline.config.machine_problems import MachineProblem
from paceline.config.path_checks import language_model_config, model_config, model_problems, tokenizer_problems
from paceline.errors import ConfigError
from paceline.external import is_installed


def check_models(cfg: PPOConfig) -> Iterator[str]:
    model = cfg.actor_rollout_ref.model
    if model.path is None:
        yield "actor_rollout_ref.model.path is not set; set it to a folder of a Hugging Face model or a hub id."
    yield from model_and_tokenizer_problems("actor_rollout_ref.model", model)
    if uses_critic(cfg) and cfg.critic.model.path is not None:
        yield from model_problems("critic.model.path", cfg.critic.model.path)
    scorer = cfg.reward_model.model
    if cfg.reward_model.enable:
        if scorer.path is None:
            yield (
                "reward_model.model.path is not set, but reward_model.enable=True; set it to a folder of a Hugging "
                "Face model or a hub id."
            )
        yield from model_and_tokenizer_problems("reward_model.model", scorer)
        if scorer.input_tokenizer is not None:
            yield from tokenizer_problems("reward_model.model.input_tokenizer", scorer.input_tokenizer)


def model_and_tokenizer_problems(section: str, model: PolicyModelConfig | RewardModelModelConfig) -> Iterator[str]:
    """A model with its tokenizer, which is beside it unless the section says otherwise."""
    if model.path is not None:
        problems = list(model_problems(f"{section}.path", model.path))
        yield from problems
        if not problems and model.tokenizer_path is None:
            yield from tokenizer_problems(f"{section}.path", model.path)
    if model.tokenizer_path is not None:
        yield from tokenizer_problems(f"{section}.tokenizer_path", model.tokenizer_path)


def check_lora(cfg: PPOConfig) -> Iterator[str]:
    model, strategy = cfg.actor_rollout_ref.model, value_of(cfg, f"{ACTOR}.strategy")
    if model.lora_rank < 1:
        return
    yield from lora_problems(MODEL, model, ACTOR, strategy)
    try:
        actor_pool, generating = next(iter(device_pools(cfg.trainer))), rollout_pools(cfg.trainer)
    except ConfigError:  # check_pools reports it
        actor_pool, generating = "", [""]
    if uses_reference(cfg) and actor_pool not in generating:
        yield (
            f"{MODEL}.lora_rank={model.lora_rank} with a KL term: actor and reference are one model, which "
            f"also generates. Set trainer.placement.rollout_on=[{','.join([actor_pool, *generating])}]."
        )


def lora_problems(model_key: str, model: PolicyModelConfig, section: str, strategy: str) -> Iterator[str]:
    """Adapters that the backend of `section` can't train, or that name no layers."""
    if model.lora_rank < 1:
        return
    if (backend := BACKENDS.get(strategy)) is not None:
        yield from refusals(
            backend, f"{section}.strategy={strategy}", [(LORA, f"{model_key}.lora_rank", model.lora_rank)]
        )
    if not model.target_modules or not all(model.target_modules):
        yield (
            f"{model_key}.target_modules={model.target_modules!r} names no layers; set it to all-linear or to names "
            "such as [q_proj, v_proj]."
        )


def check_backends(cfg: PPOConfig) -> Iterator[str]:
    """What the chosen backends can't do."""
    for section in _sections(cfg):
        model = MODEL if section == ACTOR else f"{section}.model"
        offload = [f"{section if section == ACTOR else model}.fsdp_config."]
        if section == ACTOR and uses_reference(cfg):
            offload.append("actor_rollout_ref.ref.fsdp_config.")
        yield from backend_problems(cfg, section, model, offload)


def backend_problems(cfg: AnyRunConfig, section: str, model: str, offload: list[str]) -> Iterator[str]:
    """What the backend of `section` can't do with the model's section, and with the keys that begin as `offload`."""
    strategy = value_of(cfg, f"{section}.strategy")
    backend = BACKENDS.get(strategy)
    if backend is None:
        return
    if backend.package is not None and not is_installed(backend.package):
        yield MachineProblem(
            f"{section}.strategy={strategy} needs a package that is not installed here. `make backend-{strategy}` "
            f"makes an environment that has it: run paceline from .backends/{strategy}/bin, or set "
            f"{section}.strategy=fsdp2."
        )
    asked = [(PACKING, "use_remove_padding"), (COMPILES, "use_torch_compile"), (BFLOAT16, "compute_dtype")]
    keys = [(ability, f"{model}.{name}") for ability, name in asked]
    keys += [(OFFLOAD, key) for key in known_keys(type(cfg)) if key.startswith(tuple(offload))]
    yield from refusals(
        backend, f"{section}.strategy={strategy}", [(ability, key, value_of(cfg, key)) for ability, key in keys]
    )


def check_device(cfg: PPOConfig) -> Iterator[str]:
    """What depends on the device, which may be filled in last."""
    yield from cpu_problems(cfg)


def cpu_problems(cfg: AnyRunConfig) -> Iterator[str]:
    """A device that takes nothing."""
    if cfg.trainer.device == "cpu" and cfg.trainer.cpus_per_device == 0:
        yield "trainer.cpus_per_device=0 on a CPU: a device would take nothing, and no pool could be full. Set it to 1."


def _sections(cfg: PPOConfig) -> list[str]:
    """The sections of the roles that have a backend."""
    optional = {"critic": uses_critic(cfg), "reward_model": cfg.reward_model.enable}
    return [ACTOR, *(section for section, is_used in optional.items() if is_used)]


def check_shared_sequences(
    cfg: PPOConfig, strategies: list[tuple[str, str, str]], pools: dict[str, list[int]]
) -> Iterator[str]:
    """Sizes of Ulysses that the backend, the devices or the model can't have."""
    for section, strategy, pool in strategies:
        key = f"{section}.ulysses_sequence_parallel_size"
        size, backend, devices = value_of(cfg, key), BACKENDS.get(strategy), sum(pools[pool])
        if size == 1 or backend is None:
            continue
        if refused := list(refusals(backend, f"{section}.strategy={strategy}", [(ULYSSES, key, size)])):
            yield from refused
            continue
        path = value_of(cfg, f"{MODEL if section == ACTOR else f'{section}.model'}.path") or value_of(
            cfg, f"{MODEL}.path"
        )
        config = model_config(Path(path).expanduser()) if path is not None else {}
        heads = language_model_config(config).get("num_attention_heads")
        counted = {f"{devices} devices of {pool}": devices}
        if isinstance(heads, int):
            counted[f"{heads} attention heads of {path}"] = heads
        wrong = [what for what, count in counted.items() if count % size]
        if wrong:
            common = math.gcd(*counted.values())
            fitting = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
            yield f"{key}={size} does not divide the {' and the '.join(wrong)}. Set it to one of: {fitting}."


def check_tensor_parallelism(
    cfg: AnyRunConfig, strategies: list[tuple[str, str, str]], pools: dict[str, list[int]]
) -> Iterator[str]:
    on_pool: dict[tuple[str, str], tuple[str, int]] = {}
    for section, strategy, pool in strategies:
        devices = sum(pools[pool])
        sizes = {
            f"{section}.{name}.tensor_model_parallel_size": name
            for name, backend in BACKENDS.built_in.items()
            if backend.tensor_parallel
        }
        stages = f"{section}.megatron.pipeline_model_parallel_size"
        for key, name in {**sizes, stages: "megatron"}.items():
            size = value_of(cfg, key)
            if size > 1 and strategy != name:
                yield f"{key}={size} is for {section}.strategy={name}, which is {strategy}. Leave it out."
            elif strategy == name and devices % size:
                yield f"{key}={size} does not divide the {devices} devices of {pool}. Set it to a divisor."
        if strategy != "megatron":
            continue
        tensor = f"{section}.megatron.tensor_model_parallel_size"
        if value_of(cfg, tensor) > 1 and value_of(cfg, stages) > 1:
            yield (
                f"{stages}={value_of(cfg, stages)} with {tensor}={value_of(cfg, tensor)}: the two together were not "
                "tried yet. Set one of them to 1."
            )
        for key in (tensor, stages):
            size, name = value_of(cfg, key), key.rpartition(".")[2]
            other, known = on_pool.setdefault((pool, name), (section, size))
            if size != known:
                yield (
                    f"{key}={size}, but that of {other} on the same devices is {known}, and megatron has one size per "
                    "process. Set the same for both, or trainer.placement.name=split."
                )
