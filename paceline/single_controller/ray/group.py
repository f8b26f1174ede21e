"""Worker groups on Ray, and the processes under them: started, given their ranks, ended."""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from paceline import protocol
from paceline.errors import WorkerError
from paceline.external import imported_modules
from paceline.redaction import known_secrets
from paceline.single_controller.base import MeshRank, RankCall, WorkerGroup, call_tag
from paceline.single_controller.base.dispatch import CollectFn, as_list
from paceline.single_controller.base.worker import WorkerContext
from paceline.single_controller.ray.column_store import ColumnStore, ObjectStore
from paceline.single_controller.ray.heartbeat import forget_beats
from paceline.single_controller.ray.pool import ProcessPool, RayResourcePool
from paceline.single_controller.ray.shell import (
    Call,
    ColocatedClasses,
    FromValues,
    Location,
    RayClassWithInitArgs,
    WorkerShell,
)
from paceline.single_controller.ray.watch import (
    PendingCall,
    Process,
    drain_call_records,
    meanwhile,
    running_calls,
    watch,
)

if TYPE_CHECKING:
    from paceline.protocol import DataProtoFuture

logger = logging.getLogger(__name__)

_INLINE_TYPES = (type(None), bool, int, float)
_INLINE_CHARACTERS = 1000


class RayWorkerGroup(WorkerGroup):
    """One worker per device of a pool, each in a process of its own, called together.

    Calls on the processes of one pool run in the order in which they are issued, calls on different pools at the same
    time. `name_prefix` is the role's name in errors and records; the class's name if it is left out. A group of
    colocated classes has no methods of its own: `spawn` gives one group per role. With `wait=False` the processes start
    on their own, so that several groups start at the same time; `construct_workers` must be called before any method.
    `worker_env` are environment variables of the processes, set before they start.
    """

    column_store: ColumnStore | None = ObjectStore()
    """Where large columns of answers stay until they are read; None: every answer comes to the driver whole."""

    def __init__(
        self,
        resource_pool: RayResourcePool | ProcessPool,
        ray_cls_with_init: RayClassWithInitArgs,
        name_prefix: str | None = None,
        *,
        heartbeat_timeout_seconds: float = 120.0,
        ready_timeout_seconds: float = 10.0,
        wait: bool = True,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        self._colocated = isinstance(ray_cls_with_init, ColocatedClasses)
        classes = ray_cls_with_init.by_role(name_prefix)
        super().__init__(name_prefix or "+".join(classes), resource_pool.world_size)
        self._classes = {role: item.cls for role, item in classes.items()}
        self._meshes: dict[str, list[MeshRank]] = {}
        if not self._colocated:
            self._bind_methods(ray_cls_with_init.cls)
        self._workers = WorkerProcesses(
            resource_pool,
            classes,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            ready_timeout_seconds=ready_timeout_seconds,
            worker_env=worker_env,
        )
        if wait:
            self.construct_workers()

    def construct_workers(self) -> None:
        """Wait for the processes, and construct the workers in them."""
        self._workers.construct_workers()

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One group per role of `prefix_set`, all on these same processes."""
        unknown = sorted(set(prefix_set) - set(self._classes))
        if not self._colocated or unknown:
            has = f"the roles {sorted(self._classes)}" if self._colocated else "one class, not colocated ones"
            raise ValueError(f"{self.name} has {has}; spawn was asked for {sorted(set(prefix_set))}.")
        return {role: self._view(role) for role in self._classes if role in set(prefix_set)}

    def _view(self, role: str) -> RayWorkerGroup:
        view = copy.copy(self)
        view.name = role
        view._colocated = False
        view._classes = {role: self._classes[role]}
        view._meshes = {}
        view._bind_methods(self._classes[role])
        return view

    def shutdown(self) -> None:
        """End the workers, for every role in their processes; give the devices back. A second time does nothing."""
        self._workers.shutdown()

    drain_call_records = staticmethod(drain_call_records)
    running_calls = staticmethod(running_calls)
    meanwhile = staticmethod(meanwhile)

    def mesh(self, name: str) -> list[MeshRank]:
        # Asked once, by a call that waits its turn behind those issued before: one of them may be what registers it.
        if name not in self._meshes:
            calls = [RankCall(rank, (name,)) for rank in range(self.world_size)]
            self._meshes[name] = self.submit("mesh_rank", calls, as_list, row_wise=False).get()
        return self._meshes[name]

    def submit(self, method: str, calls: list[RankCall], collect_fn: CollectFn, *, row_wise: bool) -> DataProtoFuture:
        if self._colocated:
            raise ValueError(f"{self.name} has the roles {sorted(self._classes)}: call {method} on a group of `spawn`.")
        self._workers.check_alive(self.name, method)
        call_id = watch.new_call_id()
        tag = dict(call_tag.get({}))
        check_inputs = os.environ.get("PACELINE_CHECK_INPUTS") == "1"
        packer = _Packer(packs=self.column_store is not None)
        packed, packed_for = b"", object()  # the call as it was packed, and for which arguments
        results, pending = [], []
        for rank_call in calls:
            args, kwargs, refs = packer.pack(rank_call)
            what = args, kwargs, rank_call.answers
            if not _alike(what, packed_for):
                call = Call(
                    self.name, method, args, kwargs, tag, rank_call.answers, row_wise, check_inputs, self.column_store
                )
                packed, packed_for = ray.cloudpickle.dumps(call), what
            process = self._workers.processes[rank_call.rank]
            result, record = process.actor.execute.remote(packed, *refs)
            watched = PendingCall(call_id, process, self.name, method, result.binary(), watch.unfinished(refs))
            watch.add(record, watched)
            if rank_call.answers:
                results.append(result)
                pending.append(watched)
        return protocol.DataProtoFuture(results, collect_fn, partial(watch.fetch, calls=pending))


def _alike(one: object, other: object) -> bool:
    """Whether two ranks get the same arguments: the very same objects, or references in the same places."""
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        return all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(_alike(value, other[key]) for key, value in one.items())
    return one is other or (isinstance(one, FromValues) and one == other)


class WorkerProcesses:
    """One process per device of the pool, each with a worker of every role once `construct_workers` was called."""

    def __init__(
        self,
        pool: RayResourcePool | ProcessPool,
        roles: dict[str, RayClassWithInitArgs],
        *,
        heartbeat_timeout_seconds: float,
        ready_timeout_seconds: float,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        environment = _environment(worker_env or {})
        self.pool = pool
        self.title = "+".join(roles)
        self.roles = roles
        self.processes: list[Process] = []
        self._heartbeat_prefix = uuid.uuid4().hex
        self._alive = True
        # Every failure is raised once by the watch; Ray would print it again for each rank and reference.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        options = pool.acquire(self.title, ready_timeout_seconds)
        try:
            for rank, actor_options in enumerate(options):
                key = f"{self._heartbeat_prefix}/{rank}"
                actor = ray.remote(WorkerShell).options(**actor_options, **environment).remote(self.title, rank, key)
                self.processes.append(Process(actor, rank, key, heartbeat_timeout_seconds, is_starting=True))
        except BaseException:
            self.shutdown()
            raise

    def construct_workers(self) -> None:
        """Wait for the processes and construct the worker of every role in each; at a failure all of them end."""
        try:
            self._construct_workers()
        except BaseException:
            self.shutdown()
            raise
        places = ", ".join(str(process.location) for process in self.processes)
        logger.info("%s: %d workers on pool %s (%s)", self.title, len(self.processes), self.pool.name, places)

    def _construct_workers(self) -> None:
        locations: list[Location] = self._ask("prepare", [(imported_modules(), known_secrets())] * len(self.processes))
        nodes = [location.node_id for location in locations]
        specs = ray.put(self.roles)
        arguments = []
        for process, location in zip(self.processes, locations, strict=True):
            process.location = location
            context = WorkerContext(
                pool_name=self.pool.name,
                rank=process.rank,
                world_size=len(nodes),
                local_rank=nodes[: process.rank].count(location.node_id),
                local_world_size=nodes.count(location.node_id),
                master_addr=locations[0].node_ip,
                master_port=locations[0].port,
            )
            neighbours = self.pool.workers_beside(process.rank)
            arguments.append((context, self.pool.threads_per_worker, neighbours, specs))
        self._ask("setup", arguments)
        for process in self.processes:
            process.is_starting = False

    def _ask(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Call a method of the shells themselves; a failure is one of the workers' construction."""
        call_id = watch.new_call_id()
        results, calls = [], []
        for process, args in zip(self.processes, arguments, strict=True):
            result = getattr(process.actor, method).remote(*args)
            calls.append(PendingCall(call_id, process, self.title, "__init__", result.binary()))
            watch.add(result, calls[-1])
            results.append(result)
        return watch.fetch(results, calls)

    def check_alive(self, role: str, method: str) -> None:
        if not self._alive:
            raise WorkerError(role, 0, method, f"the workers of {self.title} were shut down; make a new worker group.")

    def shutdown(self) -> None:
        """End the processes and give the devices back. Their unfinished calls are dropped."""
        if not self._alive:
            return
        self._alive = False
        watch.forget(self.processes)
        if ray.is_initialized():
            for process in self.processes:
                ray.kill(process.actor)
            forget_beats(self._heartbeat_prefix)
        self.pool.release(self.title)


def _environment(variables: dict[str, str]) -> dict[str, object]:
    """The Ray options that set these variables before the process starts; the others of the job stay."""
    if taken := sorted({*WorkerContext().variables(), "OMP_NUM_THREADS"} & set(variables)):
        raise ValueError(
            f"worker_env sets {', '.join(taken)}, which each worker gets from its place in the group; leave them out. "
            f"Threads are set by the pool's threads_per_worker."
        )
    if wrong := [name for name, value in variables.items() if not isinstance(value, str)]:
        raise TypeError(f"worker_env needs texts as values; these are not: {', '.join(wrong)}.")
    return {"runtime_env": {"env_vars": dict(variables)}} if variables else {}


class _Packer:
    """Takes what is large or still being computed out of the arguments of a call, as references.

    References must be arguments of the actor call themselves: Ray waits for those, not for references inside of lists.
    An object that several ranks get goes to the object store once.
    """

    def __init__(self, *, packs: bool) -> None:
        self._packs = packs
        self._stored: dict[int, tuple[object, ray.ObjectRef]] = {}  # holds the object, so that its id stays its own

    def pack(self, call: RankCall) -> tuple[tuple[object, ...], dict[str, object], list[ray.ObjectRef]]:
        refs: list[ray.ObjectRef] = []
        args = tuple(self._pack_value(value, refs) for value in call.args)
        kwargs = {key: self._pack_value(value, refs) for key, value in call.kwargs.items()}
        return args, kwargs, refs

    def _pack_value(self, value: object, refs: list[ray.ObjectRef]) -> object:
        start, resolver = len(refs), None
        if isinstance(value, _INLINE_TYPES) or (isinstance(value, str) and len(value) <= _INLINE_CHARACTERS):
            return value
        if isinstance(value, protocol.DataProtoFuture) and not all(
            isinstance(part, ray.ObjectRef) for part in value.parts
        ):
            value = value.get()  # its parts are in this process, as those of `then` are
        if isinstance(value, protocol.DataProtoFuture):
            refs.extend(value.parts)
            resolver = value.resolver
        elif isinstance(value, ray.ObjectRef):
            refs.append(value)
        else:
            if id(value) not in self._stored:
                sent = value
                if self._packs and protocol.is_batch(value):
                    from paceline.protocol.leaving import packed  # loads torch, as every batch has

                    sent = packed(value)
                self._stored[id(value)] = (value, ray.put(sent))
            refs.append(self._stored[id(value)][1])
        return FromValues(start, len(refs), resolver)
