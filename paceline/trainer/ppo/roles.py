"""Roles, and which pool each of them runs on.

A new role needs no change here: define an Enum of your own and use its members as keys beside ours,

    class MyRole(Enum):
        Judge = "judge"

    role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker, MyRole.Judge: JudgeWorker}
    mapping = {Role.ActorRollout: "global_pool", MyRole.Judge: "global_pool"}

and after `init_workers()` its worker group is `trainer.worker_groups[MyRole.Judge]`. (A Python Enum that has members
can't be subclassed.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
        self, *, device: str = "cpu", cpus_per_device: float = 1.0, threads_per_worker: int | None = None
    ) -> None:
        """Make the pool objects. Ray reserves their devices when the first worker group starts on each."""
        threads = threads_per_worker or self._threads_by_default()
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=list(process_on_nodes),
                use_gpu=device != "cpu",
                name_prefix=name,
                cpus_per_device=cpus_per_device,
                threads_per_worker=threads,
                device_name=device,
            )

    def get_resource_pool(self, role: Enum) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices of all pools."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())

    def _threads_by_default(self) -> int:
        """Cores over workers on a node: pools of one node share it, pools of several nodes have nodes of their own."""
        one_node = [sum(nodes) for nodes in self.resource_pool_spec.values() if len(nodes) == 1]
        several = [max(nodes) for nodes in self.resource_pool_spec.values() if len(nodes) > 1]
        return max(1, len(os.sched_getaffinity(0)) // max(sum(one_node), *several, 1))
