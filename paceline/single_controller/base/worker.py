"""What runs in a worker process: the base class, and `@register`, which makes its methods callable on the group."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Self, TypeVar

from paceline.single_controller.base.dispatch import Dispatch, DispatchMode

_MARK = "__paceline_registration__"
_Method = TypeVar("_Method", bound=Callable[..., object])


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its group."""

    role: str = "worker"
    pool_name: str = "local"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def variables(self) -> dict[str, str]:
        """What `torch.distributed`'s env:// rendezvous reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def export(self) -> None:
        """Write the variables to this process's environment."""
        os.environ.update(self.variables())


current_context: ContextVar[WorkerContext | None] = ContextVar("current_context", default=None)
"""Set around the construction of a worker; a worker made outside of any group is alone."""


@dataclass(frozen=True)
class MeshRank:
    """A rank's place in a named mesh: which shard it gets, and whether it is the one that answers for that shard."""

    dp_rank: int
    is_collect: bool


class Worker:
    """One process's part of a group: `rank` of `world_size`, methods made callable from the driver by `@register`.

    The context is there before `__init__` runs, so a subclass may use `self.rank` at once, and need not call
    `super().__init__()`. Constructors should be cheap: put what loads or allocates into a registered method.

    Methods may be `async def`. They may write to their arguments, of which they get copies.
    """

    leaves_inputs_alone: ClassVar[bool] = False
    """Set in the body of a class: the methods that it defines never write to their arguments, so they get no copies but
    the memory that all readers of a batch share. Subclasses do not inherit it."""

    _context: WorkerContext
    _meshes: dict[str, MeshRank]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        worker = super().__new__(cls)
        worker._context = current_context.get() or WorkerContext()
        worker._meshes = {}
        return worker

    @property
    def role(self) -> str:
        return self._context.role

    @property
    def pool_name(self) -> str:
        return self._context.pool_name

    @property
    def rank(self) -> int:
        return self._context.rank

    @property
    def world_size(self) -> int:
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the group's workers on this node."""
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        return self._context.local_world_size

    @property
    def master_addr(self) -> str:
        """The address of rank 0's node."""
        return self._context.master_addr

    def around_call(self) -> AbstractContextManager[None]:
        """Entered around every call from the driver, whichever class defines the method; does nothing here."""
        return nullcontext()

    def register_mesh(self, name: str, dp_rank: int, is_collect: bool) -> None:
        """Set which data shard this rank takes in calls by mesh `name`, and whether its answer is the one to keep.

        Two tensor-parallel ranks that work on one shard register the same `dp_rank`; one of them has `is_collect`.
        Call it in the constructor or in a method that runs before the first call by this mesh.
        """
        self._meshes[name] = MeshRank(dp_rank, is_collect)

    def mesh_rank(self, name: str) -> MeshRank:
        if name not in self._meshes:
            known = ", ".join(sorted(self._meshes)) or "none"
            raise KeyError(
                f"mesh {name!r} was not registered (registered: {known}); call self.register_mesh({name!r}, ...)."
            )
        return self._meshes[name]


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    """Every rank that the dispatch mode names."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone, with the arguments it would have got; the result is its own."""


@dataclass(frozen=True)
class Registration:
    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL, blocking: bool = True
) -> Callable[[_Method], _Method]:
    """Make a method of a worker callable on its group.

    With `blocking=True` the call gives its result; with False a `DataProtoFuture`, whose `.get()` gives it, and which
    other groups take as an argument. An override in a subclass keeps the registration unless it has its own. A method
    may be `async def`: it runs to its end before the worker's next call.
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise TypeError(f"register takes a dispatch mode, e.g. @register(Dispatch.ONE_TO_ALL); got {dispatch_mode!r}.")
    if not isinstance(execute_mode, Execute):
        raise TypeError(f"register takes Execute.ALL or Execute.RANK_ZERO as execute_mode; got {execute_mode!r}.")

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The registered methods of a class by name, those of its bases included."""
    found: dict[str, Registration] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if hasattr(attribute, _MARK):
                found[name] = getattr(attribute, _MARK)
    return found
