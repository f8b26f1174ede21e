"""Worker groups on Ray."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import ray
from ray.actor import ActorClass

from paceline.protocol import DataProtoFuture
from paceline.single_controller.base import MeshRank, RankCall, WorkerGroup, call_tag
from paceline.single_controller.base.dispatch import CollectFn, as_list
from paceline.single_controller.ray.pool import ProcessPool, RayResourcePool
from paceline.single_controller.ray.processes import WorkerProcesses
from paceline.single_controller.ray.shell import Call, FromValues, RoleSpec
from paceline.single_controller.ray.watch import PendingCall, drain_call_records, running_calls, watch

_INLINE_TYPES = (type(None), bool, int, float)
_INLINE_CHARACTERS = 1000


class RayClassWithInitArgs:
    """A worker class, plain or `ray.remote`, and the arguments to construct it with in each worker process."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(cls, ActorClass):
            cls = vars(cls)["__ray_metadata__"].modified_class.__ray_actor_class__
        if not isinstance(cls, type):
            raise TypeError(f"RayClassWithInitArgs takes a worker class; got {cls!r}.")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


class ColocatedClasses(RayClassWithInitArgs):
    """Several worker classes that share one process; made by `create_colocated_worker_cls`."""

    def __init__(self, classes: dict[str, RayClassWithInitArgs]) -> None:
        super().__init__(type("+".join(classes), (), {}))
        self.classes = classes


class RayWorkerGroup(WorkerGroup):
    """One worker per device of a pool, each in a process of its own, called together.

    Calls on the processes of one pool run in the order in which they are issued, calls on different pools at the same
    time. `name_prefix` is the role's name in errors and records; the class's name if it is left out. A group of
    colocated classes has no methods of its own: `spawn` gives one group per role. With `wait=False` the processes start
    on their own, so that several groups start at the same time; `construct_workers` must be called before any method.
    `worker_env` are environment variables of the processes, set before they start.
    """

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
        if isinstance(ray_cls_with_init, ColocatedClasses):
            classes = ray_cls_with_init.classes
        else:
            classes = {name_prefix or ray_cls_with_init.cls.__name__: ray_cls_with_init}
        super().__init__(name_prefix or "+".join(classes), resource_pool.world_size)
        self._classes = {role: item.cls for role, item in classes.items()}
        self._meshes: dict[str, list[MeshRank]] = {}
        if not self._colocated:
            self._bind_methods(ray_cls_with_init.cls)
        self._workers = WorkerProcesses(
            resource_pool,
            {role: RoleSpec(item.cls, item.args, item.kwargs) for role, item in classes.items()},
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
        packer = _Packer()
        results, pending = [], []
        for rank_call in calls:
            args, kwargs, refs = packer.pack(rank_call)
            call = Call(self.name, method, args, kwargs, tag, rank_call.answers, row_wise, check_inputs)
            process = self._workers.processes[rank_call.rank]
            result, record = process.actor.execute.remote(call, *refs)
            watched = PendingCall(call_id, process, self.name, method, result.binary(), watch.unfinished(refs))
            watch.add(record, watched)
            if rank_call.answers:
                results.append(result)
                pending.append(watched)
        return DataProtoFuture(results, collect_fn, partial(watch.fetch, calls=pending))


class _Packer:
    """Takes what is large or still being computed out of the arguments of a call, as references.

    References must be arguments of the actor call themselves: Ray waits for those, not for references inside of lists.
    An object that several ranks get goes to the object store once.
    """

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Any, ray.ObjectRef]] = {}  # holds the object, so that its id stays its own

    def pack(self, call: RankCall) -> tuple[tuple[Any, ...], dict[str, Any], list[ray.ObjectRef]]:
        refs: list[ray.ObjectRef] = []
        args = tuple(self._pack_value(value, refs) for value in call.args)
        kwargs = {key: self._pack_value(value, refs) for key, value in call.kwargs.items()}
        return args, kwargs, refs

    def _pack_value(self, value: Any, refs: list[ray.ObjectRef]) -> Any:
        start, resolver = len(refs), None
        if isinstance(value, _INLINE_TYPES) or (isinstance(value, str) and len(value) <= _INLINE_CHARACTERS):
            return value
        if isinstance(value, DataProtoFuture):
            refs.extend(value.parts)
            resolver = value.resolver
        elif isinstance(value, ray.ObjectRef):
            refs.append(value)
        else:
            if id(value) not in self._stored:
                self._stored[id(value)] = (value, ray.put(value))
            refs.append(self._stored[id(value)][1])
        return FromValues(start, len(refs), resolver)
