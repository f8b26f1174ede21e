"""How devices are divided into pools: arithmetic only. A pool is a list of devices per node."""

from __future__ import annotations

from paceline.config.trainer import TrainerConfig
from paceline.errors import ConfigError

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"

Pools = dict[str, list[int]]


def device_pools(trainer: TrainerConfig) -> Pools:
    """The pools of a placement. What does not divide, and what would leave a device idle, is a ConfigError.

    >>> device_pools(TrainerConfig(nnodes=2, n_gpus_per_node=4))
    {'global_pool': [4, 4]}
    >>> device_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(name="split")))
    {'actor_rollout_ref_pool': [2], 'critic_pool': [2]}
    >>> device_pools(TrainerConfig(nnodes=3, n_gpus_per_node=4, placement=PlacementConfig("split", critic_devices=1)))
    {'actor_rollout_ref_pool': [4, 4], 'critic_pool': [4]}
    """
    placement = trainer.placement
    if placement.name == "colocated":
        if placement.critic_devices is not None:
            raise ConfigError(
                f"trainer.placement.critic_devices={placement.critic_devices} has no part in colocated placement; "
                "set trainer.placement.name=split or leave it null."
            )
        return {GLOBAL_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}
    by_node = trainer.nnodes > 1
    critic = _critic_share(trainer, by_node)
    if by_node:
        actor_nodes = trainer.nnodes - critic
        return {
            ACTOR_POOL: [trainer.n_gpus_per_node] * actor_nodes,
            CRITIC_POOL: [trainer.n_gpus_per_node] * critic,
        }
    return {ACTOR_POOL: [trainer.n_gpus_per_node - critic], CRITIC_POOL: [critic]}


def _critic_share(trainer: TrainerConfig, by_node: bool) -> int:
    """Nodes or devices of the critic."""
    key, unit = ("trainer.nnodes", "nodes") if by_node else ("trainer.n_gpus_per_node", "devices")
    total = trainer.nnodes if by_node else trainer.n_gpus_per_node
    share = trainer.placement.critic_devices
    if total < 2:
        raise ConfigError(
            "trainer.placement.name=split wants at least two devices; trainer.nnodes=1 and trainer.n_gpus_per_node=1 "
            "give one. Raise trainer.n_gpus_per_node or set trainer.placement.name=colocated."
        )
    if share is None and total % 2:
        raise ConfigError(
            f"{key}={total} does not divide into two equal pools; set trainer.placement.critic_devices to the number "
            f"of {unit} for the critic (1 to {total - 1}), or make {key} even."
        )
    if share is not None and not 1 <= share < total:
        raise ConfigError(
            f"trainer.placement.critic_devices={share} leaves a pool without {unit}: {key}={total}. "
            f"Set it from 1 to {total - 1}."
        )
    return total // 2 if share is None else share
