"""Planning a run before anything starts: pools, the pool of each role, and both derived tables as text.

Takes the configuration, gives numbers and strings; nothing here needs Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from paceline.algorithms.advantages import estimator_needs
from paceline.algorithms.policy_loss import loss_in_use, loss_traits
from paceline.config import PPOConfig
from paceline.config.derived import (
    ACTOR_POOL,
    CRITIC_POOL,
    GLOBAL_POOL,
    REWARD_MODEL_POOL,
    TEACHER_POOL,
    UPDATE_ROWS,
    Pools,
    actor_goes_by_tokens,
    critic_config,
    device_pools,
    learns_from_rewards,
    pools_apart,
    rollout_pools,
    run_pools,
    update_sizes,
    uses_reference,
)
from paceline.trainer.ppo.token_budgets import with_token_budgets


def uses_critic(cfg: PPOConfig) -> bool:
    """Whether the estimator needs a critic."""
    return learns_from_rewards(cfg) and estimator_needs(cfg.algorithm.adv_estimator).needs_critic


def uses_reward_model(cfg: PPOConfig) -> bool:
    """Whether a reward model scores."""
    return cfg.reward_model.enable


def plan_pools(cfg: PPOConfig) -> Pools:
    """Devices per node of each pool that has a role; see `idle_devices` for what split placement then leaves over."""
    pools = run_pools(cfg)
    scores_there = uses_reward_model(cfg) and REWARD_MODEL_POOL not in pools
    teaches_there = cfg.distillation.enabled and TEACHER_POOL not in pools
    if not (uses_critic(cfg) or scores_there or teaches_there or CRITIC_POOL in rollout_pools(cfg.trainer)):
        pools.pop(CRITIC_POOL, None)
    return pools


def idle_devices(cfg: PPOConfig) -> int:
    """Devices of critic_pool in split placement without critic, reward model and teacher: the only ones that a plan
    leaves without a role."""
    return sum(map(sum, run_pools(cfg).values())) - sum(map(sum, plan_pools(cfg).values()))


def role_to_pool(cfg: PPOConfig) -> dict[str, str]:
    """Name of each role that this run has to the name of its pool.

    With gae, split placement and a KL term:
    {"ActorRollout": "actor_rollout_ref_pool", "RefPolicy": "actor_rollout_ref_pool", "Critic": "critic_pool"}.
    With LoRA the reference is the actor without its adapters, so both are one role, ActorRolloutRef.
    """
    split = cfg.trainer.placement.name == "split"
    actor_pool = ACTOR_POOL if split else GLOBAL_POOL
    generating = rollout_pools(cfg.trainer)
    roles = {"ActorRollout" if actor_pool in generating else "Actor": actor_pool}
    if uses_reference(cfg) and cfg.actor_rollout_ref.model.lora_rank > 0:
        roles = {"ActorRolloutRef": actor_pool}
    elif uses_reference(cfg):
        roles["RefPolicy"] = actor_pool
    critic_pool = CRITIC_POOL if split else GLOBAL_POOL
    if uses_critic(cfg):
        roles["Critic"] = critic_pool
    if uses_reward_model(cfg):
        roles["RewardModel"] = REWARD_MODEL_POOL if REWARD_MODEL_POOL in run_pools(cfg) else critic_pool
    if cfg.distillation.enabled:
        roles["Teacher"] = TEACHER_POOL if TEACHER_POOL in run_pools(cfg) else critic_pool
    if generating[-1] != actor_pool:
        roles["Rollout"] = generating[-1]
    return roles


@dataclass(frozen=True)
class UpdatePlan:
    """How one step's batch is cut for one trained role. Responses unless it says prompts."""

    devices: int
    mini_batch_prompts: int
    mini_batch: int
    """Over all devices."""
    epochs: int
    mini_batches: int
    """In one pass over the batch."""
    per_device: int
    """Of a mini-batch, at most."""
    micro_batch: int
    """Per device, at most."""
    micro_batches: int
    """Per device and optimizer step: the gradient accumulation."""
    tokens_per_micro_batch: int
    """Per device, at most."""
    is_dynamic: bool = False
    """Micro-batches have as many responses as fit into their tokens, so their number depends on the lengths."""

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs


def update_plans(cfg: PPOConfig) -> dict[str, UpdatePlan]:
    """The update of the actor and, where there is one, of the critic."""
    cfg = with_token_budgets(cfg)
    actor, critic = cfg.actor_rollout_ref.actor, critic_config(cfg)
    roles, pools = role_to_pool(cfg), plan_pools(cfg)
    plans = {
        "actor": _update_plan(
            cfg,
            update_sizes(actor),
            devices=sum(pools[next(iter(roles.values()))]),
            micro_batch=actor.ppo_micro_batch_size_per_gpu or UPDATE_ROWS,
            max_tokens=actor.ppo_max_token_len_per_gpu if actor_goes_by_tokens(actor) else None,
        )
    }
    if "Critic" in roles:
        plans["critic"] = _update_plan(
            cfg,
            update_sizes(critic),
            devices=sum(pools[roles["Critic"]]),
            micro_batch=critic.ppo_micro_batch_size_per_gpu or UPDATE_ROWS,
            max_tokens=critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None,
        )
    return plans


def _update_plan(
    cfg: PPOConfig, sizes: tuple[int, int], *, devices: int, micro_batch: int, max_tokens: int | None
) -> UpdatePlan:
    mini_batch_prompts, epochs = sizes
    mini_batch = mini_batch_prompts * cfg.actor_rollout_ref.rollout.n
    per_device = ceil(mini_batch / devices)
    micro_batch = min(micro_batch, per_device)
    return UpdatePlan(
        devices=devices,
        mini_batch_prompts=mini_batch_prompts,
        mini_batch=mini_batch,
        epochs=epochs,
        mini_batches=ceil(cfg.data.train_batch_size / mini_batch_prompts),
        per_device=per_device,
        micro_batch=micro_batch,
        micro_batches=ceil(per_device / micro_batch),
        tokens_per_micro_batch=max_tokens or micro_batch * (cfg.data.max_prompt_length + cfg.data.max_response_length),
        is_dynamic=max_tokens is not None,
    )


def batch_table(cfg: PPOConfig) -> str:
    """What the batch sizes of a configuration come to, in which unit, per device or over all."""
    data, n = cfg.data, cfg.actor_rollout_ref.rollout.n
    responses = data.train_batch_size * n
    tokens = data.max_prompt_length + data.max_response_length
    lines = [
        "One step",
        _row("prompts", data.train_batch_size, "data.train_batch_size"),
        _row("responses", responses, f"prompts x rollout.n ({n})"),
        _row(
            "tokens, at most",
            responses * tokens,
            f"responses x ({data.max_prompt_length} + {data.max_response_length})",
        ),
    ]
    for role, plan in update_plans(cfg).items():
        shared = f"over {plan.devices} device{'s' if plan.devices > 1 else ''}"
        uneven = "" if plan.mini_batch % plan.devices == 0 else ", at most; rows that pad the last device weigh nothing"
        last = "" if plan.per_device % plan.micro_batch == 0 else "; the last one is smaller"
        lines += [
            "",
            f"Update of the {role} ({shared})",
            _row("mini-batches per pass", plan.mini_batches, f"of {plan.mini_batch_prompts} prompts"),
            _row("optimizer steps", plan.optimizer_steps, f"mini-batches x ppo_epochs ({plan.epochs})"),
            _row("responses per optimizer step", plan.mini_batch, f"{plan.mini_batch_prompts} prompts x {n}, {shared}"),
            _row("responses per device", plan.per_device, f"of an optimizer step{uneven}"),
        ]
        if plan.is_dynamic:
            meaning = "per device, at most; as many responses as fit (ppo_max_token_len_per_gpu)"
        else:
            meaning = "per device, at most"
            responses_each = f"of {plan.micro_batch} responses, accumulated{last}"
            lines.append(_row("micro-batches per device", plan.micro_batches, responses_each))
        lines.append(_row("tokens per micro-batch", plan.tokens_per_micro_batch, meaning))
    lines += ["", _loss_line(cfg)]
    return "\n".join(lines)


def _loss_line(cfg: PPOConfig) -> str:
    actor, correction = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction
    loss = loss_in_use(actor.policy_loss.loss_mode, bypass=correction.bypass_mode)
    if actor.loss_agg_mode is not None:
        return f"Policy loss {loss}, aggregated by {actor.loss_agg_mode} (loss_agg_mode)"
    return (
        f"Policy loss {loss}, aggregated by {loss_traits(loss).loss_agg_mode} (its own way; loss_agg_mode is not set)"
    )


def _row(name: str, number: int, meaning: str) -> str:
    return f"  {name:<30}{number:>12,}  {meaning}"


def placement_picture(cfg: PPOConfig) -> str:
    """Nodes as boxes, pools as columns in them, with their devices and roles.

    node 0
    +------------------------+-------------+
    | actor_rollout_ref_pool | critic_pool |
    | [0] [1]                | [2] [3]     |
    | actor, rollout         | critic      |
    +------------------------+-------------+
    """
    words = {
        "ActorRollout": "actor, rollout",
        "Actor": "actor",
        "Rollout": "rollout",
        "ActorRolloutRef": "actor, rollout, reference",
        "RefPolicy": "reference",
        "Critic": "critic",
        "RewardModel": "reward model",
        "Teacher": "teacher",
    }
    roles: dict[str, list[str]] = {}
    for role, pool in role_to_pool(cfg).items():
        roles.setdefault(pool, []).append(words[role])
    trainer, pools = cfg.trainer, device_pools(cfg.trainer)
    # With one node all pools are on it; with several, each pool has nodes of its own.
    if trainer.nnodes == 1:
        nodes = [[(pool, devices[0]) for pool, devices in pools.items()]]
    else:
        nodes = [[(pool, count)] for pool, devices in pools.items() for count in devices]
    kind = f" ({trainer.device})" if trainer.device else ""
    lines = [f"Placement: {trainer.placement.name}, {trainer.nnodes} x {trainer.n_gpus_per_node} devices{kind}"]
    places = [(f"node {number}", columns) for number, columns in enumerate(nodes)]
    places += [("on any node", [(pool, count)]) for pool, counts in pools_apart(cfg).items() for count in counts]
    for place, columns in places:
        lines += ["", f"  {place}", *_boxes(columns, roles, cfg.algorithm.adv_estimator)]
    return "\n".join(lines)


def _boxes(columns: list[tuple[str, int]], roles: dict[str, list[str]], estimator: str) -> list[str]:
    cells: list[list[str]] = []
    first = 0
    for pool, count in columns:
        devices = " ".join(f"[{device}]" for device in range(first, first + count))
        duty = ", ".join(roles[pool]) if pool in roles else f"not used: {estimator} has no critic"
        cells.append([pool, devices, duty])
        first += count
    widths = [max(map(len, cell)) for cell in cells]
    border = "  +" + "+".join("-" * (width + 2) for width in widths) + "+"
    rows = [
        "  |" + "|".join(f" {text:<{width}} " for text, width in zip(row, widths, strict=True)) + "|"
        for row in zip(*cells, strict=True)
    ]
    return [border, *rows, border]
