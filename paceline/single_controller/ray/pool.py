"""Resource pools: which devices of which nodes a group of workers gets."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import ResourceError
from paceline.private_apis.ray_private import clusters_of_this_machine, free_resources

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Between two looks at the nodes of a cluster that grows."""
REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class _Device:
    """What one worker takes: CPUs, and an accelerator unless the device is the CPU itself."""

    cpus: float
    accelerator: str | None
    max_colocate_count: int = 1
    """How many workers, of as many groups, may share it."""

    def share(self) -> dict[str, float]:
        """What each of the workers that may share it takes; rounded down, as Ray counts in steps of 0.0001."""
        return {
            name: math.floor(amount / self.max_colocate_count * 10_000) / 10_000
            for name, amount in self.resources().items()
        }

    def resources(self, num_devices: int = 1) -> dict[str, float]:
        wanted = {"CPU": self.cpus * num_devices} if self.cpus else {}
        if self.accelerator:
            wanted[self.accelerator] = float(num_devices)
        return wanted

    def fitting(self, resources: dict[str, float]) -> int:
        """How many such devices these resources hold."""
        shares = (resources.get(name, 0.0) / amount for name, amount in self.resources().items())
        return int(min(shares) + 1e-6)  # CPUs may be fractions, 0.3 / 0.1 is less than 3


@dataclass(eq=False)
class _Placement:
    """One placement group: a bundle of devices on each of as many nodes. It exists while a worker group uses it.

    An accelerator that workers share has a bundle of its own: of a bundle with several, Ray would give shares of the
    same one to the ranks of a group.
    """

    name: str
    devices_per_node: tuple[int, ...]
    device: _Device
    wait_for_nodes_seconds: float = 0.0
    taken: dict[_Slot, list[str]] = field(default_factory=dict)
    group: PlacementGroup | None = None

    @property
    def has_bundle_per_device(self) -> bool:
        return self.device.accelerator is not None and self.device.max_colocate_count > 1

    def take(self, slots: Sequence[_Slot], owner: str, timeout_seconds: float) -> None:
        limit = self.device.max_colocate_count
        busy = sorted({name for slot in slots if len(names := self.taken.get(slot, [])) >= limit for name in names})
        if busy:
            raise ResourceError(
                f"{owner} wants devices of pool {self.name!r} that are in use by {', '.join(busy)}. Put the roles into "
                f"one process with create_colocated_worker_cls, split the pool, shut the other group down first, or "
                f"let more groups share a device: max_colocate_count={limit}."
            )
        if self.group is None:
            self.group = self._reserve(timeout_seconds)
        for slot in slots:
            self.taken.setdefault(slot, []).append(owner)

    def release(self, slots: Sequence[_Slot], owner: str) -> None:
        for slot in slots:
            self.taken[slot].remove(owner)
            if not self.taken[slot]:
                del self.taken[slot]
        if self.group is not None and not self.taken:
            if ray.is_initialized():
                remove_placement_group(self.group)
            self.group = None

    def bundles(self) -> tuple[int, ...]:
        """How many devices each bundle has."""
        return (1,) * sum(self.devices_per_node) if self.has_bundle_per_device else self.devices_per_node

    def _fits_the_cluster(self) -> bool:
        """Whether its nodes are large enough, were they free."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        capacities = sorted((self.device.fitting(node["Resources"]) for node in nodes), reverse=True)
        wanted = sorted(self.devices_per_node, reverse=True)
        return len(wanted) <= len(capacities) and all(d <= c for d, c in zip(wanted, capacities, strict=False))

    def _reserve(self, timeout_seconds: float) -> PlacementGroup:
        if not self._fits_the_cluster() and not self.wait_for_nodes_seconds:
            raise ResourceError(self._explain("can never fit this cluster"))
        # STRICT_SPREAD puts each bundle on a node of its own: a pool of two nodes is not satisfied by one big node.
        group = placement_group(
            [self.device.resources(num_devices) for num_devices in self.bundles()],
            strategy="STRICT_SPREAD" if len(self.devices_per_node) > 1 else "STRICT_PACK",
            name=self._name_in_ray(),
        )
        if not self._wait_for_nodes():
            explanation = self._explain(f"did not fit this cluster within {self.wait_for_nodes_seconds:g} s")
            remove_placement_group(group)
            raise ResourceError(explanation)
        # The promise is an error within the timeout, so the wait leaves a tenth of it for the explanation.
        ready, _ = ray.wait([group.ready()], timeout=0.9 * timeout_seconds)
        if not ready:
            explanation = self._explain(f"was not free within {timeout_seconds:g} s")
            remove_placement_group(group)
            raise ResourceError(explanation)
        return group

    def _wait_for_nodes(self) -> bool:
        """Whether the cluster is large enough, now or in time. It grows by what placement groups wait for."""
        started = time.monotonic()
        reported = -math.inf
        while not self._fits_the_cluster():
            waited = time.monotonic() - started
            if waited > self.wait_for_nodes_seconds:
                return False
            if waited - reported >= REPORT_SECONDS:
                logger.warning("%s", self._explain(f"waits for nodes since {waited:.0f} s"))
                reported = waited
            time.sleep(POLL_SECONDS)
        return True

    def _name_in_ray(self) -> str:
        """Ray keeps the groups of an actor that died: the process that started the actor finds them by its id."""
        actor_id = ray.get_runtime_context().get_actor_id()
        return f"{self.name} of {actor_id}" if actor_id else self.name

    def _explain(self, problem: str) -> str:
        """What is wanted, what each node has and has free, who holds the rest, what to change."""
        device = " + ".join(f"{amount:g} {name}" for name, amount in self.device.resources().items())
        num_nodes = len(self.devices_per_node)
        holders = [
            f"  {entry['name'] or entry['placement_group_id'][:8]}: {', '.join(map(str, entry['bundles'].values()))}"
            for entry in placement_group_table().values()
            if entry["state"] == "CREATED"
        ]
        return "\n".join(
            [
                f"pool {self.name!r} {problem}.",
                f"wanted: {' + '.join(map(str, self.devices_per_node))} devices of {device} each, on "
                + (f"{num_nodes} different nodes" if num_nodes > 1 else "one node"),
                "available:",
                *_table(self.device),
                *(["held by placement groups:", *holders] if holders else []),
                "Lower the devices per node, the number of nodes or the CPUs per device, or give Ray more: "
                "num_cpus or num_gpus of ray.init or `ray start`, or more nodes.",
                *_other_clusters(),
            ]
        )


def _other_clusters() -> list[str]:
    """A line if another Ray runs on this machine, which is joined only by its address."""
    here = ray.get_runtime_context().gcs_address
    # A Ray of a run's own, which takes no others, is on the loopback address.
    others = sorted(
        address for address in clusters_of_this_machine() if address != here and not address.startswith("127.")
    )
    if not others:
        return []
    return [
        f"This Ray is at {here}. Another one runs on this machine, at {', '.join(others)}, and was not joined: that "
        "takes an address. Set that of ray.init to auto, or RAY_ADDRESS to this one."
    ]


def _table(device: _Device) -> list[str]:
    """A line per node: free and total devices, CPUs and accelerators."""
    accelerator = device.accelerator or "GPU"
    free_by_node = free_resources()
    rows = [["node", *(f"{name} free / total" for name in ("devices", "CPU", accelerator))]]
    for node in (node for node in ray.nodes() if node["Alive"]):
        free, total = free_by_node.get(node["NodeID"], {}), node["Resources"]
        amounts = [f"{free.get(name, 0):g} / {total.get(name, 0):g}" for name in ("CPU", accelerator)]
        devices = f"{device.fitting(free)} / {device.fitting(total)}"
        rows.append([f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})", devices, *amounts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@dataclass(frozen=True)
class _Slot:
    """One device: `index` within bundle `bundle` of a placement group."""

    placement: _Placement
    bundle: int
    index: int


class RayResourcePool:
    """Devices for one worker each: `process_on_nodes` is how many on each node, e.g. `[4, 4]` for two nodes of four.

    Nothing is reserved until a worker group starts on the pool; then all of it is, on that many different nodes, or
    there is a `ResourceError` that shows what the cluster has.

    `max_colocate_count` groups may be on the pool at a time, each in processes of its own, which run side by side:
    the order of calls holds within a group alone. Roles that take turns belong into one process instead, by
    `create_colocated_worker_cls`. `threads_per_worker`: compute threads; None divides the cores of each worker's own
    node by the workers there. `wait_for_nodes_seconds`: how long a pool that is too large for the cluster waits for
    nodes to join before that is an error.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str = "pool",
        max_colocate_count: int = 1,
        *,
        cpus_per_device: float = 1.0,
        threads_per_worker: int | None = None,
        device_name: str | None = None,
        wait_for_nodes_seconds: float = 0.0,
    ) -> None:
        if not process_on_nodes or any(num_devices < 1 for num_devices in process_on_nodes):
            raise ValueError(
                f"pool {name_prefix!r} needs at least one device on each node; got {list(process_on_nodes)}."
            )
        if cpus_per_device < 0 or (cpus_per_device == 0 and not use_gpu):
            raise ValueError(f"pool {name_prefix!r}: cpus_per_device must be positive; got {cpus_per_device:g}.")
        if max_colocate_count < 1:
            raise ValueError(f"pool {name_prefix!r}: max_colocate_count must be 1 or more; got {max_colocate_count}.")
        if use_gpu and max_colocate_count > 1 and len(process_on_nodes) > 1 and max(process_on_nodes) > 1:
            raise ValueError(
                f"pool {name_prefix!r}: groups can't share accelerators of {len(process_on_nodes)} nodes in one pool; "
                f"make a pool of each node with max_colocate_count={max_colocate_count}, and merge them."
            )
        self.name = name_prefix
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.device_name = device_name or ("cuda" if use_gpu else "cpu")
        if (self.device_name != "cpu") != use_gpu:
            raise ValueError(f"pool {name_prefix!r}: use_gpu={use_gpu} contradicts device_name={device_name!r}.")
        self.threads_per_worker = threads_per_worker
        accelerator = {"cpu": None, "npu": "NPU"}.get(self.device_name, "GPU")
        self._device = _Device(cpus_per_device, accelerator, max_colocate_count)
        placement = _Placement(name_prefix, tuple(process_on_nodes), self._device, wait_for_nodes_seconds)
        self._slots = [
            _Slot(placement, bundle, index)
            for bundle, num_devices in enumerate(placement.bundles())
            for index in range(num_devices)
        ]

    @property
    def world_size(self) -> int:
        return len(self._slots)

    def split(self, sizes: Sequence[int], names: Sequence[str] | None = None) -> list[RayResourcePool]:
        """Pools of `sizes` devices, in order, node after node. They share this pool's reservation of nodes."""
        if sum(sizes) != self.world_size or any(size < 1 for size in sizes):
            raise ValueError(
                f"pool {self.name!r} has {self.world_size} devices; sizes {list(sizes)} must be positive and add up to "
                f"that."
            )
        names = names or [f"{self.name}_{index}" for index in range(len(sizes))]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [
            self._with_slots(self._slots[end - size : end], name)
            for size, end, name in zip(sizes, ends, names, strict=True)
        ]

    def merge(self, *others: RayResourcePool, name: str | None = None) -> RayResourcePool:
        """One pool of the devices of all, in order. Pools that were not split from one pool may share nodes."""
        pools = (self, *others)
        if any(pool._device != self._device for pool in pools):
            raise ValueError(
                f"pools {[pool.name for pool in pools]} have different kinds of devices; they can't be merged."
            )
        slots = [slot for pool in pools for slot in pool._slots]
        if len(set(slots)) < len(slots):
            raise ValueError(f"pools {[pool.name for pool in pools]} share devices; merge each device once.")
        return self._with_slots(slots, name or "+".join(pool.name for pool in pools))

    def acquire(self, owner: str, timeout_seconds: float) -> list[dict[str, object]]:
        """Reserve the devices for `owner`, and give the Ray options of an actor on each."""
        done: list[_Placement] = []
        try:
            for placement in self._placements():
                placement.take(self._slots_of(placement), owner, timeout_seconds)
                done.append(placement)
        except ResourceError:
            for placement in done:
                placement.release(self._slots_of(placement), owner)
            raise
        logger.info("pool %s: %d devices reserved for %s", self.name, self.world_size, owner)
        return [self._actor_options(slot) for slot in self._slots]

    def workers_beside(self, rank: int) -> int:
        """How many workers are on the node of this one, itself too; other pools may share the reservation."""
        slot = self._slots[rank]
        counts = slot.placement.devices_per_node
        return counts[0] if len(counts) == 1 else counts[slot.bundle]

    def release(self, owner: str) -> None:
        """Give the devices of `owner` back; the reservation ends when no group uses any device of it."""
        for placement in self._placements():
            placement.release(self._slots_of(placement), owner)

    def _actor_options(self, slot: _Slot) -> dict[str, object]:
        assert slot.placement.group is not None
        wanted = self._device.share()
        return {
            "num_cpus": wanted.pop("CPU", 0),
            "num_gpus": wanted.pop("GPU", 0),
            "resources": wanted,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.placement.group, slot.bundle),
        }

    def _placements(self) -> list[_Placement]:
        return list(dict.fromkeys(slot.placement for slot in self._slots))

    def _slots_of(self, placement: _Placement) -> list[_Slot]:
        return [slot for slot in self._slots if slot.placement is placement]

    def _with_slots(self, slots: Sequence[_Slot], name: str) -> RayResourcePool:
        pool = copy.copy(self)
        pool.name, pool._slots = name, list(slots)
        return pool


class ProcessPool:
    """Processes that take no device and no CPU of Ray's, wherever there is room: for work that mostly waits."""

    device_name = "cpu"

    def __init__(self, num_processes: int, name: str, *, threads_per_worker: int = 1) -> None:
        if num_processes < 1:
            raise ValueError(f"pool {name!r} needs at least one process; got {num_processes}.")
        self.name = name
        self.world_size = num_processes
        self.threads_per_worker = threads_per_worker

    def acquire(self, owner: str, timeout_seconds: float) -> list[dict[str, object]]:
        """The Ray options of each actor; there is nothing to wait for."""
        del owner, timeout_seconds
        return [{"num_cpus": 0, "scheduling_strategy": "SPREAD"}] * self.world_size

    def workers_beside(self, rank: int) -> int:
        """Unknown: Ray puts them anywhere."""
        del rank
        return self.world_size

    def release(self, owner: str) -> None:
        """Nothing was reserved."""
        del owner
