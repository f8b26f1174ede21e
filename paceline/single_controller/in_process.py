"""A worker group without Ray: every role of a one-device pool as a plain object in this process.

For debuggers and quick experiments: pass `ray_worker_group_cls=InProcessWorkerGroup` where `RayWorkerGroup` would go,
and a breakpoint in a worker is a breakpoint in your program. A call runs when it is issued, and a worker's
exception is raised as it is.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from paceline.errors import ResourceError
from paceline.protocol import DataProtoFuture
from paceline.single_controller.base import CallRecord, MeshRank, RankCall, Worker, WorkerGroup, call_tag
from paceline.single_controller.base.calls import leaves_inputs_alone, private_copy, run_method
from paceline.single_controller.base.dispatch import CollectFn, as_list, drop_padding
from paceline.single_controller.base.worker import WorkerContext, current_context
from paceline.single_controller.ray.pool import ProcessPool, RayResourcePool
from paceline.single_controller.ray.shell import ColocatedClasses, RayClassWithInitArgs

_records: list[CallRecord] = []
_running: dict[str, str] = {}


class InProcessWorkerGroup(WorkerGroup):
    """The interface of `RayWorkerGroup` over workers in this process; takes pools of one device."""

    def __init__(
        self,
        resource_pool: RayResourcePool | ProcessPool,
        ray_cls_with_init: RayClassWithInitArgs,
        name_prefix: str | None = None,
        *,
        heartbeat_timeout_seconds: float = 120.0,
        wait: bool = True,
    ) -> None:
        del heartbeat_timeout_seconds, wait  # there are no processes to start or to watch
        if resource_pool.world_size != 1:
            raise ResourceError(
                f"pool {resource_pool.name} has {resource_pool.world_size} devices; a process can be one of them. "
                f"Use RayWorkerGroup, or one device per pool."
            )
        classes = ray_cls_with_init.by_role(name_prefix)
        super().__init__(name_prefix or "+".join(classes), world_size=1)
        self._context = WorkerContext(pool_name=resource_pool.name)
        self._process_roles = "+".join(classes)
        self._workers = {role: self._construct(role, item) for role, item in classes.items()}
        if not isinstance(ray_cls_with_init, ColocatedClasses):
            self._bind_methods(ray_cls_with_init.cls)

    def _construct(self, role: str, item: RayClassWithInitArgs) -> Worker:
        token = current_context.set(replace(self._context, role=role))
        try:
            return item.cls(*item.args, **item.kwargs)
        finally:
            current_context.reset(token)

    def construct_workers(self) -> None:
        """Nothing to do: the constructor made them."""

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, InProcessWorkerGroup]:
        """One group per role of `prefix_set`, over these same workers."""
        views = {}
        for role in prefix_set:
            view = copy.copy(self)
            view.name = role
            view._bind_methods(type(self._workers[role]))
            views[role] = view
        return views

    def submit(self, method: str, calls: list[RankCall], collect_fn: CollectFn, *, row_wise: bool) -> DataProtoFuture:
        results = []
        for call in calls:
            start = time.time()
            args = [_resolved(value) for value in call.args]
            kwargs = {key: _resolved(value) for key, value in call.kwargs.items()}
            worker = self._workers[self.name]
            tag = dict(call_tag.get({}))
            token = call_tag.set(tag)
            _running[self.name] = method
            try:
                result = run_method(worker, method, args, kwargs)
                if not leaves_inputs_alone(worker, method):
                    result = private_copy(result, worker, method)  # as if it had come from another process
            finally:
                del _running[self.name]
                call_tag.reset(token)
            results.append(drop_padding(result, [*args, *kwargs.values()]) if row_wise else result)
            _records.append(
                CallRecord(
                    pool=self._context.pool_name,
                    process_roles=self._process_roles,
                    role=self.name,
                    rank=0,
                    pid=os.getpid(),
                    node="localhost",
                    method=method,
                    start=start,
                    end=time.time(),
                    tag=tag,
                )
            )
        return DataProtoFuture(results, collect_fn, as_list)

    def mesh(self, name: str) -> list[MeshRank]:
        return [self._workers[self.name].mesh_rank(name)]

    @staticmethod
    def drain_call_records() -> list[CallRecord]:
        """The records of all calls since the last time."""
        records = list(_records)
        _records.clear()
        return records

    @staticmethod
    def running_calls() -> dict[str, str]:
        """The call that runs now, if any: role to method."""
        return dict(_running)

    @staticmethod
    def meanwhile(do: Callable[[], None]) -> AbstractContextManager[None]:
        """Nothing is ever waited for: a call has ended when it was issued."""
        return nullcontext()

    def shutdown(self) -> None:
        """Drop the workers."""
        self._workers = {}


def _resolved(value: object) -> object:
    return value.get() if isinstance(value, DataProtoFuture) else value
