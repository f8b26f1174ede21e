"""The worker processes of one group, or of several roles that share them: started, told where they stand, ended."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import ray

from paceline.errors import WorkerError
from paceline.external import imported_modules
from paceline.redaction import known_secrets
from paceline.single_controller.base.worker import WorkerContext
from paceline.single_controller.ray.heartbeat import forget_beats
from paceline.single_controller.ray.pool import ProcessPool, RayResourcePool
from paceline.single_controller.ray.shell import Location, RoleSpec, WorkerShell
from paceline.single_controller.ray.watch import PendingCall, Process, watch

logger = logging.getLogger(__name__)


class WorkerProcesses:
    """One process per device of the pool, each with a worker of every role once `construct_workers` was called."""

    def __init__(
        self,
        pool: RayResourcePool | ProcessPool,
        roles: dict[str, RoleSpec],
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
                self.processes.append(Process(actor, rank, key, heartbeat_timeout_seconds))
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

    def _ask(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
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
        """End the processes and give the devices back. What they still owed is forgotten."""
        if not self._alive:
            return
        self._alive = False
        watch.forget(self.processes)
        if ray.is_initialized():
            for process in self.processes:
                ray.kill(process.actor)
            forget_beats(self._heartbeat_prefix)
        self.pool.release(self.title)


def _environment(variables: dict[str, str]) -> dict[str, Any]:
    """The Ray options that set these variables before the process starts; the others of the job stay."""
    if taken := sorted({*WorkerContext().variables(), "OMP_NUM_THREADS"} & set(variables)):
        raise ValueError(
            f"worker_env sets {', '.join(taken)}, which each worker gets from its place in the group; leave them out. "
            f"Threads are set by the pool's threads_per_worker."
        )
    if wrong := [name for name, value in variables.items() if not isinstance(value, str)]:
        raise TypeError(f"worker_env needs texts as values; these are not: {', '.join(wrong)}.")
    return {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
