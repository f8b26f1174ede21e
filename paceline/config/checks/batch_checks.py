"""Batch sizes that do not fit each other, or the devices of a pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.catalog import BACKENDS
from paceline.config import PPOConfig
from paceline.config.checks.model_checks import check_shared_sequences, check_tensor_parallelism
from paceline.config.derived import CRITIC_POOL, GLOBAL_POOL, REWARD_MODEL_POOL, rollout_pools, run_pools, uses_critic
from paceline.config.keys import ACTOR, ROLLOUT
from paceline.errors import ConfigError


def check_mini_batches(cfg: PPOConfig) -> Iterator[str]:
    """Mini-batches that do not divide the batch of a step."""
    num_prompts = cfg.data.train_batch_size
    mini_batches = {f"{ACTOR}.ppo_mini_batch_size": cfg.actor_rollout_ref.actor.ppo_mini_batch_size}
    if uses_critic(cfg) and cfg.critic.ppo_mini_batch_size is not None:
        mini_batches["critic.ppo_mini_batch_size"] = cfg.critic.ppo_mini_batch_size
    for key, size in mini_batches.items():
        if size > num_prompts:
            yield (
                f"{key}={size} is more than data.train_batch_size={num_prompts}; both count prompts. "
                f"Set {key} to {num_prompts} or one of its divisors. {_sizes(cfg, size)}"
            )
        elif num_prompts % size:
            yield (
                f"{key}={size} does not divide data.train_batch_size={num_prompts}: the last mini-batch would be "
                f"smaller than the others. Set {key} to a divisor, such as {_divisor_near(num_prompts, size)}. "
                f"{_sizes(cfg, size)}"
            )


def check_pools(cfg: PPOConfig) -> Iterator[str]:
    """Pools that can't be made, and roles that do not fit the devices of theirs."""
    try:
        pools, generating = run_pools(cfg), rollout_pools(cfg.trainer)
    except ConfigError as error:
        yield from error.problems
        return
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    shared_by = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    for pool in generating:
        if any(count % shared_by for count in pools[pool]):
            yield (
                f"{ROLLOUT}.tensor_model_parallel_size={shared_by} does not divide the devices that {pool} has on a "
                f"node, {pools[pool][0]}. Set it to a divisor."
            )
    critic_pool = CRITIC_POOL if CRITIC_POOL in pools else GLOBAL_POOL
    mini_batches = {ACTOR: (actor.ppo_mini_batch_size, next(iter(pools)))}
    strategies = [(ACTOR, str(actor.strategy), next(iter(pools)))]
    if uses_critic(cfg):
        mini_batches["critic"] = (cfg.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic_pool)
        strategies.append(("critic", str(cfg.critic.strategy), critic_pool))
    if cfg.reward_model.enable:
        scorer_pool = REWARD_MODEL_POOL if REWARD_MODEL_POOL in pools else critic_pool
        strategies.append(("reward_model", str(cfg.reward_model.strategy), scorer_pool))
    yield from check_tensor_parallelism(cfg, strategies, pools)
    yield from check_shared_sequences(cfg, strategies, pools)
    for section, strategy, pool in strategies:
        backend = BACKENDS.get(strategy)
        if backend is not None and not backend.many_devices and sum(pools[pool]) > 1:
            advice = "trainer.n_gpus_per_node=1" if pool == GLOBAL_POOL else "give the pool one device"
            yield (
                f"{section}.strategy={strategy} works on one device, and {pool} has {sum(pools[pool])}. "
                f"Set {section}.strategy=fsdp2 or {advice}."
            )
    reported: set[tuple[int, str]] = set()
    for section, (mini_batch, pool) in mini_batches.items():
        num_devices, responses = sum(pools[pool]), mini_batch * rollout.n
        if responses < num_devices and (mini_batch, pool) not in reported:
            reported.add((mini_batch, pool))
            yield (
                f"{section}.ppo_mini_batch_size={mini_batch} gives {responses} responses per optimizer step for the "
                f"{num_devices} devices of {pool}: some would be idle. Raise it or {ROLLOUT}.n to have at least "
                f"{num_devices} responses."
            )


def _sizes(cfg: PPOConfig, mini_batch: int) -> str:
    """What the batch sizes come to, in one line; trainer.dry_run=True shows all of it once they fit."""
    prompts, n = cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.n
    return (
        f"A step is {prompts:,} prompts x {ROLLOUT}.n={n} = {prompts * n:,} responses, an optimizer step "
        f"{mini_batch:,} x {n} = {mini_batch * n:,}."
    )


def _divisor_near(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, of those that are found at once."""
    small = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]
    return min((*small, *(number // size for size in small)), key=lambda size: abs(size - wanted))
