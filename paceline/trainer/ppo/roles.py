"""Roles, and which pool each of them runs on.

A new role needs no change here: members of any Enum are keys beside ours. (A Python Enum that has members can't be
subclassed.) docs/single_controller.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.errors import ConfigError
from paceline.single_controller.ray import RayResourcePool


class Role(Enum):
    """What a worker does in the training loop."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Teacher = 7


_NAMES = {
    Role.ActorRollout: "actor_rollout",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
}


def role_name(role: Enum) -> str:
    """How a role is called in errors, timelines and worker groups.

    >>> role_name(Role.RefPolicy)
    'ref'
    """
    return _NAMES.get(role, role.name.lower())  # type: ignore[call-overload]


@dataclass
class ResourcePoolManager:
    """Pools by name (devices per node), and the pool of each role.

    >>> manager = ResourcePoolManager({"global_pool": [2]}, {Role.ActorRollout: "global_pool"})
    >>> manager.get_n_gpus()
    2
    """

    resource_pool_spec: Mapping[str, list[int]]
    mapping: Mapping[Enum, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [
            f"role {role.name} is mapped to pool {pool!r}, which is not among {sorted(self.resource_pool_spec)}."
            for role, pool in self.mapping.items()
            if pool not in self.resource_pool_spec
        ]
        if unknown:
            raise ConfigError(unknown)

    def create_resource_pool(
        self,
        *,
        nnodes: int = 1,
        device: str = "cpu",
        cpus_per_device: float = 1.0,
        threads_per_worker: int | None = None,
        wait_for_nodes_seconds: float = 0.0,
        apart: Collection[str] = (),
    ) -> None:
        """Make the pool objects. Ray reserves their devices when the first worker group starts.

        One reservation covers all pools but those that are `apart`, which have one each. The others are cut out of it:
        pools of one node then really share that node, and pools of several nodes never do.
        """

        def reserve(nodes: list[int], name: str) -> RayResourcePool:
            return RayResourcePool(
                process_on_nodes=nodes,
                use_gpu=device != "cpu",
                name_prefix=name,
                cpus_per_device=cpus_per_device,
                threads_per_worker=threads_per_worker,
                device_name=device,
                wait_for_nodes_seconds=wait_for_nodes_seconds,
            )

        together = {name: list(nodes) for name, nodes in self.resource_pool_spec.items() if name not in apart}
        reservation = reserve(_joint_nodes(list(together.values()), nnodes), "+".join(together))
        pools = reservation.split([sum(nodes) for nodes in together.values()], list(together))
        self.resource_pool_dict = dict(zip(together, pools, strict=True))
        for name in self.resource_pool_spec.keys() - together.keys():
            self.resource_pool_dict[name] = reserve(list(self.resource_pool_spec[name]), name)

    def get_resource_pool(self, role: Enum) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices of all pools."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())


def _joint_nodes(pools: list[list[int]], nnodes: int) -> list[int]:
    """Devices per node over pools that have a reservation together."""
    if nnodes == 1 and all(len(nodes) == 1 for nodes in pools):
        return [sum(map(sum, pools))]
    return [devices for nodes in pools for devices in nodes]
