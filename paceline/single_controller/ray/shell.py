"""The actor that holds a process's workers, and what the driver sends to it."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace

import ray
from ray.actor import ActorClass

from paceline.errors import RemoteCause, WorkerError
from paceline.external import import_external
from paceline.log_file import log_process
from paceline.machine import num_cores
from paceline.private_apis.ray_private import class_of_actor
from paceline.protocol import is_batch
from paceline.redaction import remember_all
from paceline.single_controller.base.calls import CallRecord, call_tag, run_method
from paceline.single_controller.base.dispatch import CollectFn, drop_padding
from paceline.single_controller.base.worker import Worker, WorkerContext, current_context
from paceline.single_controller.ray.column_store import ColumnStore, Maker
from paceline.single_controller.ray.heartbeat import Place, start_heartbeat


class RayClassWithInitArgs:
    """A worker class, plain or `ray.remote`, and the arguments to construct it with in each worker process."""

    def __init__(self, cls: type | ActorClass, *args: object, **kwargs: object) -> None:
        if isinstance(cls, ActorClass):
            cls = class_of_actor(cls)
        if not isinstance(cls, type):
            raise TypeError(f"RayClassWithInitArgs takes a worker class; got {cls!r}.")
        self.cls: type[Worker] = cls
        self.args = args
        self.kwargs = kwargs

    def by_role(self, name: str | None) -> dict[str, RayClassWithInitArgs]:
        """The classes of a process by role. `name` is the role of a class that is alone; else the class's own."""
        return {name or self.cls.__name__: self}


class ColocatedClasses(RayClassWithInitArgs):
    """Several worker classes that share one process; made by `create_colocated_worker_cls`."""

    def __init__(self, classes: dict[str, RayClassWithInitArgs]) -> None:
        super().__init__(type("+".join(classes), (), {}))
        self.classes = classes

    def by_role(self, name: str | None) -> dict[str, RayClassWithInitArgs]:
        return self.classes


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One class that holds a worker of every role of `class_dict`, for pools that several roles share.

    The workers live in one process per device and run one call at a time; they are constructed in the order of
    `class_dict`. `RayWorkerGroup(pool, colocated).spawn(roles)` gives a group for each role.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls got no classes; give it at least one role.")
    return ColocatedClasses(class_dict)


@dataclass(frozen=True)
class FromValues:
    """Stands in a call for an argument that arrives by reference: `values[start:stop]`, joined by `resolver` if any."""

    start: int
    stop: int
    resolver: CollectFn | None = None

    def resolve(self, values: tuple[object, ...]) -> object:
        if self.resolver is None:
            return values[self.start]
        return self.resolver(list(values[self.start : self.stop]))


@dataclass(frozen=True)
class Call:
    """One method call on one rank. Large arguments and futures are `FromValues`.

    It travels as bytes, which Ray sends as they are: left to Ray, it would be pickled for each rank, by a slow pickler.
    """

    role: str
    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    tag: dict[str, object]
    answers: bool
    row_wise: bool
    check_inputs: bool
    column_store: ColumnStore | None
    """Where large columns of the answer stay; None: they go along."""


@dataclass(frozen=True)
class Location(Place):
    """Where a worker process runs, and a port that is free there."""

    port: int


class WorkerShell:
    """Constructs the workers of all roles of one process and runs their methods, one call at a time, in order.

    It must stay a plain synchronous actor with one thread of calls: the order of calls rests on that. Heartbeats
    come from a thread of their own, also while a call runs.
    """

    def __init__(self, process_roles: str, rank: int, heartbeat_key: str) -> None:
        self._process_roles = process_roles
        self._rank = rank
        self._workers: dict[str, Worker] = {}
        self._contexts: dict[str, WorkerContext] = {}
        start_heartbeat(heartbeat_key)

    def __repr__(self) -> str:
        return f"{self._process_roles}[{self._rank}]"  # Ray prefixes this process's output with it

    def prepare(self, modules: tuple[str, ...], secrets: frozenset[str]) -> Location:
        """Import the modules that the driver imported, hide the same secrets, and return where this process runs.

        The first call: later arguments may be of classes of those modules.
        """
        remember_all(secrets)
        for module in modules:
            import_external(module)
        # The socket stays bound until the process ends, so that no other program is given the port before rank 0
        # listens on it; SO_REUSEADDR lets that happen.
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("", 0))
        port = self._port_holder.getsockname()[1]
        return Location(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), port)

    def setup(
        self,
        context: WorkerContext,
        num_threads: int | None,
        num_neighbours: int,
        roles: dict[str, RayClassWithInitArgs],
    ) -> bytes:
        """Set the environment, then construct the worker of every role. `num_neighbours` share this node's cores."""
        start = time.time()
        log_process(f"{self._process_roles}_{context.rank}", process=repr(self))
        self._pool_name = context.pool_name
        context.export()
        num_threads = num_threads or max(1, num_cores() // num_neighbours)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        if "torch" in sys.modules:  # else it reads the variable when a worker's class or arguments bring it
            sys.modules["torch"].set_num_threads(num_threads)
        for role, spec in roles.items():
            self._contexts[role] = replace(context, role=role)
            current_context.set(self._contexts[role])
            try:
                self._workers[role] = spec.cls(*spec.args, **spec.kwargs)
            except Exception as error:
                raise self._failure(role, "__init__", error) from None
        return self._record(self._process_roles, "__init__", start, {})

    @ray.method(num_returns=2)
    def execute(self, packed: bytes, *values: object) -> tuple[object, bytes]:
        """Run one call. The record is a result of its own, so that the driver can watch many calls for little."""
        call: Call = pickle.loads(packed)
        current_context.set(self._contexts[call.role])  # for workers that the method itself constructs
        call_tag.set(call.tag)
        args, kwargs = self._inputs(call, values)
        start = time.time()
        try:
            worker = self._workers[call.role]
            output = run_method(worker, call.method, args, kwargs, check_inputs=call.check_inputs)
            if call.row_wise:
                output = drop_padding(output, [*args, *kwargs.values()])
            if not call.answers:
                output = None
            elif call.column_store is not None and is_batch(output):
                output = call.column_store.leave(output, Maker(call.role, self._rank, call.method))
        except Exception as error:
            raise self._failure(call.role, call.method, error) from None
        return output, self._record(call.role, call.method, start, call.tag)

    def _inputs(self, call: Call, values: tuple[object, ...]) -> tuple[list[object], dict[str, object]]:
        """The arguments, with all their columns here."""

        def fill(value: object) -> object:
            value = value.resolve(values) if isinstance(value, FromValues) else value
            return value.fetched() if is_batch(value) else value

        try:
            return [fill(value) for value in call.args], {key: fill(value) for key, value in call.kwargs.items()}
        except WorkerError:
            raise  # of the worker that made a column
        except Exception as error:
            raise self._failure(call.role, call.method, error) from None

    def _failure(self, role: str, method: str, error: Exception) -> WorkerError:
        cause = RemoteCause.of(error)
        return WorkerError(role, self._rank, method, f"{type(error).__name__}: {error}", traceback.format_exc(), cause)

    def _record(self, role: str, method: str, start: float, tag: dict[str, object]) -> bytes:
        record = CallRecord(
            pool=self._pool_name,
            process_roles=self._process_roles,
            role=role,
            rank=self._rank,
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            method=method,
            start=start,
            end=time.time(),
            tag=tag,
        )
        return pickle.dumps(record)
