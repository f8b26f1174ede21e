"""How much memory a run takes on each device, estimated before anything starts.

Takes the configuration and what the model folders say of themselves (config.json, the headers of their safetensors);
gives numbers and text. No model is loaded. What stays is exact: weights, gradients and AdamW's moments, in float32.
Keys and values are those of full-length responses. Activations are a rule of thumb for decoder models. Not in it:
Python and its libraries (about 0.3 GB a process), Ray's object store, the batches themselves, fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from paceline.config import CriticConfig, ModelConfig, PPOConfig, RewardModelConfig
from paceline.config.derived import (
    backend_for,
    device_pools,
    pipeline_parallel_size,
    rollout_pools,
    run_pools,
    teacher_models,
    tensor_parallel_size,
    with_backends,
)
from paceline.trainer.ppo.model_size import FLOAT, Head, ModelSize, available_memory, read_model_size
from paceline.trainer.ppo.placement import role_to_pool, update_plans

GIB = 2**30
VALIDATION_FILLINGS = 4
"""Responses of a validation batch, in `max_num_seqs` of the devices that sample them."""
VALIDATION_SHARE = 1 / 8
"""Of a node's or an accelerator's memory, for the keys and values of a validation batch."""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device."""

    role: str
    pool: str
    stays: dict[str, int]
    while_working: dict[str, int] = field(default_factory=dict)
    """Given back when the role has done its part of a step; roles of a device work one after another."""


@dataclass(frozen=True)
class MemoryPlan:
    """The estimate of a run."""

    roles: list[RoleMemory]
    devices_on_node: dict[str, int]
    """Of each pool, on the node that has the most of it."""
    shares_machine: bool
    """Whether the devices of a node share its main memory, as on a CPU."""
    on_one_node: bool
    unknown: list[str]
    """Models whose size can't be read here."""

    def per_device(self, pool: str) -> int:
        """All that stays, and the most that one role takes while it works."""
        roles = [role for role in self.roles if role.pool == pool]
        working = max((sum(role.while_working.values()) for role in roles), default=0)
        return sum(sum(role.stays.values()) for role in roles) + working

    def largest(self) -> int:
        """What must fit: the fullest device, or on a CPU the fullest node."""
        pools = {role.pool for role in self.roles}
        if not self.shares_machine:
            return max((self.per_device(pool) for pool in pools), default=0)
        by_pool = [self.devices_on_node[pool] * self.per_device(pool) for pool in pools]
        return sum(by_pool) if self.on_one_node else max(by_pool, default=0)


def plan_memory(cfg: PPOConfig) -> MemoryPlan:
    """The estimate for a complete configuration."""
    cfg = with_backends(cfg)
    policy, actor = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.actor
    roles, pools, plans = role_to_pool(cfg), run_pools(cfg), update_plans(cfg)
    on_cpu = (cfg.trainer.device or "cpu") == "cpu"
    actor_pool = next(iter(roles.values()))
    wanted: dict[str, tuple[ModelConfig, Head, str]] = {"actor": (policy, "language", actor_pool)}
    if "RefPolicy" in roles:
        wanted["reference"] = (policy, "language", roles["RefPolicy"])
    if "Critic" in roles:
        own = cfg.critic.model
        wanted["critic"] = (policy if own.path is None else own, "value", roles["Critic"])
    if "RewardModel" in roles:
        wanted["reward model"] = (cfg.reward_model.model, "score", roles["RewardModel"])
    for name, model in teacher_models(cfg).items():
        wanted[f"teacher {name}"] = (model, "language", roles["Teacher"])
    sections: dict[str, CriticConfig | RewardModelConfig] = {"critic": cfg.critic, "reward model": cfg.reward_model}

    found: list[RoleMemory] = []
    unknown: list[str] = []
    for role, (model, head, pool) in wanted.items():
        size = read_model_size(model)
        if size is None:
            unknown.append(f"{role} ({model.path})")
            continue
        size = size.with_head(head)
        section = sections.get(role, actor)
        strategy, parallel = section.strategy, tensor_parallel_size(section) * pipeline_parallel_size(section)
        if role.startswith("teacher "):
            strategy, parallel = backend_for(None, sum(pools[pool])), 1
        # megatron's data-parallel ranks hold copies.
        shards = {"local": 1, "megatron": parallel}.get(str(strategy), sum(pools[pool]))
        weights = size.parameters(shards) * FLOAT
        gathered = {"gathered layers": size.gathered() * FLOAT // parallel} if shards > parallel else {}
        if role in plans:
            model_settings = policy if role == "actor" else cfg.critic.model
            trained = weights
            if role == "actor" and policy.lora_rank > 0:
                trained = ceil(size.adapter_parameters(policy.lora_rank, policy.target_modules) / shards) * FLOAT
                weights += trained
            stays = {"weights": weights, "AdamW": 2 * trained}
            update = {
                "gradients": trained,
                "activations": size.activation_bytes(
                    plans[role].tokens_per_micro_batch,
                    checkpointing=model_settings.enable_gradient_checkpointing,
                    head=head,
                ),
            }
            found.append(RoleMemory(role, pool, stays, update | gathered))
            if on_cpu and cfg.trainer.save_freq != -1:
                copy = 3 * trained * shards
                found.append(RoleMemory(f"checkpoint of the {role}", pool, {"copy on rank 0": copy}))
        else:
            found.append(RoleMemory(role, pool, {"weights": weights}, gathered))
        if role == "actor":
            generating = rollout_pools(cfg.trainer)
            devices = sum(sum(pools[name]) for name in generating)
            found += [
                _rollout(cfg, size, name, devices=devices, shares_weights=name == actor_pool and strategy == "local")
                for name in generating
            ]
    on_nodes = {pool: max(devices) for pool, devices in pools.items()}
    return MemoryPlan(found, on_nodes, on_cpu, on_one_node=cfg.trainer.nnodes == 1, unknown=unknown)


def _rollout(cfg: PPOConfig, size: ModelSize, pool: str, *, devices: int, shares_weights: bool) -> RoleMemory:
    """The native and hf rollouts sample from a local actor's own weights; all others have a whole copy."""
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    responses = data.train_batch_size * rollout.n
    if data.val_files:
        val_prompts = data.val_batch_size or validation_batch_size(cfg)
        responses = max(responses, val_prompts * rollout.val_kwargs.n)
    sequences = min(rollout.max_num_seqs, ceil(responses / devices))
    cache = size.key_value_bytes(sequences, data.max_prompt_length + data.max_response_length)
    shared = shares_weights and rollout.name != "vllm"
    copy = {} if shared else {"weights": size.parameters() * FLOAT // rollout.tensor_model_parallel_size}
    working = {"keys and values": cache}
    policy = cfg.actor_rollout_ref.model
    dtype = rollout.dtype or policy.compute_dtype
    if rollout.name == "native" and dtype == "float32" and (cfg.trainer.device or "cpu") == "cpu":
        # A copy of the actor's weights has its adapters merged.
        working["packed weights"] = size.packed_bytes(policy.target_modules if shared and policy.lora_rank else [])
    return RoleMemory("rollout", pool, copy, working)


def validation_batch_size(cfg: PPOConfig) -> int:
    """Prompts per validation batch where data.val_batch_size leaves it open.

    Several fillings of the rollout's `max_num_seqs`, so that it has work to the end; of the engines that hold keys and
    values beside everything else (all but vLLM) no more than a share of the memory, and never less than in training.
    It does not depend on devices that do not generate, so placements validate alike.
    """
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    pools = device_pools(cfg.trainer)
    generating = [pools[name] for name in rollout_pools(cfg.trainer)]
    devices = sum(map(sum, generating))
    responses = VALIDATION_FILLINGS * rollout.max_num_seqs
    if rollout.name != "vllm":
        size = read_model_size(cfg.actor_rollout_ref.model)
        available = available_memory(cfg.trainer.device or "cpu")
        on_a_node = max(map(max, generating)) if (cfg.trainer.device or "cpu") == "cpu" else 1
        fitting = 0
        if size is not None and available is not None:
            one = size.key_value_bytes(1, data.max_prompt_length + data.max_response_length)
            fitting = int(available * VALIDATION_SHARE / on_a_node / max(one, 1))
        fitting = max(fitting, ceil(data.train_batch_size * rollout.n / devices))
        if fitting < rollout.max_num_seqs:
            responses = fitting
    return max(1, responses * devices // rollout.val_kwargs.n)


def memory_table(plan: MemoryPlan, available: int | None) -> str:
    """The estimate as text."""
    lines = ["Memory per device in GiB, estimated: what stays | and while it works"]
    for pool in dict.fromkeys(role.pool for role in plan.roles):
        lines += ["", f"  {pool}"]
        for role in plan.roles:
            if role.pool == pool:
                lines.append(f"    {role.role:<24}{_parts(role.stays)} | {_parts(role.while_working)}")
        lines.append(f"    {'together, at most':<24}{_gib(plan.per_device(pool))}")
    lines += [f"  not known: {what} has no safetensors here" for what in plan.unknown]
    if plan.shares_machine:
        lines += ["", f"  all devices of a node: {_gib(plan.largest())}"]
    if available is not None:
        where = "this machine" if plan.shares_machine else "a device here"
        lines.append(f"  memory of {where}: {_gib(available)}")
    lines.append("  Without Python (about 0.3 a process), batches and fragmentation; activations are a rule of thumb.")
    return "\n".join(lines)


def memory_warning(plan: MemoryPlan, available: int | None) -> str | None:
    """What to say if the estimate is more than there is."""
    if available is None or plan.largest() <= available:
        return None
    where = "a node of this run" if plan.shares_machine else "a device of this run"
    return (
        f"{where} is estimated to need {_gib(plan.largest())} GiB, and there are {_gib(available)} GiB. Lower "
        "ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu of actor and critic, or "
        "actor_rollout_ref.rollout.max_num_seqs; set model.enable_gradient_checkpointing=True; use more devices with "
        "strategy=fsdp2. trainer.dry_run=True shows what is in the estimate."
    )


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items()) or "nothing"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}" if size >= GIB / 100 else f"{size / GIB:.4f}"
