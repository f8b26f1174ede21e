"""A group of workers, seen from the driver as one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.single_controller.base.dispatch import CollectFn, Dispatch, RankCall, only_one
from paceline.single_controller.base.worker import Execute, MeshRank, Registration, registered_methods

if TYPE_CHECKING:
    from paceline.protocol import DataProtoFuture


class WorkerGroup(ABC):
    """`world_size` workers of one role. Every registered method of the worker's class is a method of the group."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """A registered method; `_bind_methods` makes them."""

    @abstractmethod
    def submit(self, method: str, calls: list[RankCall], collect_fn: CollectFn, *, row_wise: bool) -> DataProtoFuture:
        """Issue the calls in order and return at once; the future gives `collect_fn` of those that answer."""

    @abstractmethod
    def mesh(self, name: str) -> list[MeshRank]:
        """Each rank's place in the mesh that the workers registered under `name`."""

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> DataProtoFuture:
        """Call any method of the workers, registered or not, on all ranks; arguments as by `Dispatch.ALL_TO_ALL`.

        The future's `get()` gives a list with one item per rank.
        """
        mode = Dispatch.ALL_TO_ALL
        return self.submit(method_name, mode.dispatch_fn(self, *args, **kwargs), mode.collect_fn, row_wise=False)

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """As `execute_all_async`, and wait."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> DataProtoFuture:
        """Call any method of the workers, registered or not, on rank 0; the future's `get()` gives its result."""
        mode = Dispatch.RANK_ZERO
        return self.submit(method_name, mode.dispatch_fn(self, *args, **kwargs), mode.collect_fn, row_wise=False)

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:
        """As `execute_rank_zero_async`, and wait."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _bind_methods(self, worker_cls: type) -> None:
        for name, registration in registered_methods(worker_cls).items():
            if hasattr(self, name):
                raise ValueError(f"{worker_cls.__name__}.{name} hides {type(self).__name__}.{name}; rename the method.")
            setattr(self, name, self._make_method(name, registration))

    def _make_method(self, name: str, registration: Registration) -> Callable[..., Any]:
        mode = registration.dispatch_mode

        def call(*args: object, **kwargs: object) -> Any:
            calls, collect_fn = mode.dispatch_fn(self, *args, **kwargs), mode.collect_fn
            if registration.execute_mode is Execute.RANK_ZERO:
                calls, collect_fn = [rank_call for rank_call in calls if rank_call.rank == 0], only_one
            future = self.submit(name, calls, collect_fn, row_wise=mode.row_wise)
            return future.get() if registration.blocking else future

        call.__name__ = name
        return call
