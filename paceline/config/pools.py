"""How devices are divided into pools: arithmetic only. A pool is a list of devices per node."""

from __future__ import annotations

from paceline.config.actor_rollout_ref import ActorConfig
from paceline.config.critic import CriticConfig
from paceline.config.reward import RewardModelConfig
from paceline.config.trainer import PlacementConfig, TrainerConfig
from paceline.errors import ConfigError

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"
ROLLOUT_POOL = "rollout_pool"

Pools = dict[str, list[int]]


def tensor_parallel_size(section: ActorConfig | CriticConfig | RewardModelConfig) -> int:
    """Of the backend that the section names; 1 if that has no tensor parallelism."""
    backends = {"megatron": section.megatron, "torchtitan": section.torchtitan}
    return backends[section.strategy].tensor_model_parallel_size if section.strategy in backends else 1


def device_pools(trainer: TrainerConfig) -> Pools:
    """The pools of a placement. What does not divide, and what would leave a device idle, is a ConfigError.

    >>> device_pools(TrainerConfig(nnodes=2, n_gpus_per_node=4))
    {'global_pool': [4, 4]}
    >>> device_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(name="split")))
    {'actor_rollout_ref_pool': [2], 'critic_pool': [2]}
    >>> device_pools(TrainerConfig(nnodes=3, n_gpus_per_node=4, placement=PlacementConfig("split", critic_devices=1)))
    {'actor_rollout_ref_pool': [4, 4], 'critic_pool': [4]}
    >>> device_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(rollout_devices=1)))
    {'global_pool': [3], 'rollout_pool': [1]}
    """
    placement = trainer.placement
    by_node = trainer.nnodes > 1
    total = trainer.nnodes if by_node else trainer.n_gpus_per_node
    key, unit = ("trainer.nnodes", "nodes") if by_node else ("trainer.n_gpus_per_node", "devices")
    shares: dict[str, int] = {}
    if placement.rollout_devices is not None:
        shares[ROLLOUT_POOL] = _within("rollout_devices", placement.rollout_devices, total, key, unit)
        total -= placement.rollout_devices
        key = f"{key} less trainer.placement.rollout_devices"
    if placement.name == "split":
        shares[CRITIC_POOL] = _critic_share(placement, total, key, unit)
        shares[ACTOR_POOL] = total - shares[CRITIC_POOL]
    elif placement.critic_devices is not None:
        raise ConfigError(
            f"trainer.placement.critic_devices={placement.critic_devices} has no part in colocated placement; "
            "set trainer.placement.name=split or leave it null."
        )
    else:
        shares[GLOBAL_POOL] = total
    names = [name for name in (GLOBAL_POOL, ACTOR_POOL, CRITIC_POOL, ROLLOUT_POOL) if name in shares]
    return {name: [trainer.n_gpus_per_node] * shares[name] if by_node else [shares[name]] for name in names}


def rollout_pools(trainer: TrainerConfig) -> list[str]:
    """The pools that generate, the actor's first if it is among them.

    >>> rollout_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(rollout_devices=1)))
    ['rollout_pool']
    """
    pools, asked = device_pools(trainer), trainer.placement.rollout_on
    actor_pool = next(iter(pools))
    if asked is None:
        return [ROLLOUT_POOL if ROLLOUT_POOL in pools else actor_pool]
    text = f"trainer.placement.rollout_on=[{','.join(asked)}]"
    unknown = [name for name in asked if name not in pools]
    if unknown or not asked:
        found = f"names {', '.join(unknown)}, which this placement does not have" if unknown else "names no pool"
        raise ConfigError(f"{text} {found}. The pools are: {', '.join(pools)}.")
    others = sorted(set(asked) - {actor_pool})
    if len(others) > 1 or len(set(asked)) < len(asked):
        raise ConfigError(f"{text}: name each pool once, {actor_pool} and at most one more.")
    if ROLLOUT_POOL in pools and ROLLOUT_POOL not in asked:
        raise ConfigError(f"{text} leaves rollout_pool idle; add it, or leave trainer.placement.rollout_devices null.")
    return [actor_pool] * (actor_pool in asked) + others


def _within(name: str, share: int, total: int, key: str, unit: str) -> int:
    if not 1 <= share < total:
        advice = f"Set it from 1 to {total - 1}." if total > 1 else f"Raise {key.split()[0]} or leave it null."
        raise ConfigError(f"trainer.placement.{name}={share} leaves a pool without {unit}: {key}={total}. {advice}")
    return share


def _critic_share(placement: PlacementConfig, total: int, key: str, unit: str) -> int:
    """Nodes or devices of the critic."""
    if total < 2:
        raise ConfigError(
            f"trainer.placement.name=split wants at least two {unit} for actor and critic; {key}={total}. "
            "Raise trainer.n_gpus_per_node or set trainer.placement.name=colocated."
        )
    if placement.critic_devices is not None:
        return _within("critic_devices", placement.critic_devices, total, key, unit)
    if total % 2:
        raise ConfigError(
            f"{key}={total} does not divide into two equal pools; set trainer.placement.critic_devices to the number "
            f"of {unit} for the critic (1 to {total - 1}), or change {key.split()[0]} by one."
        )
    return total // 2
