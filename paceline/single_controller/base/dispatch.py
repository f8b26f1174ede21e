"""How the arguments of a call on a group become the arguments of each rank, and the ranks' answers one result.

A mode is a pair of functions. `dispatch_fn(group, *args, **kwargs)` gives a list of `RankCall`s; `collect_fn(outputs)`
joins the answers, which come in the order of that list. Both must not depend on the answers being there: a dispatch
function sees a `DataProtoFuture` where the caller passed one, and leaves its resolution to the worker.

Data-parallel modes cut every `DataProto` argument into one contiguous shard per rank, sizes differing by at most one
row; smaller shards are padded by one repeated row to the size of the largest, so that all ranks do the same number of
steps. A shard says in `meta_info["num_padding_rows"]` how many of its last rows are padding. Padding is cut from the
worker's answer in the worker, before it is sent: neither the driver nor another group ever sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import protocol

if TYPE_CHECKING:
    from paceline.protocol import DataProto
    from paceline.single_controller.base.worker_group import WorkerGroup

T = TypeVar("T")
PADDING_KEY = "num_padding_rows"


@dataclass(frozen=True)
class RankCall:
    """The arguments of one rank. A rank with `answers=False` runs the method, but its result is dropped there."""

    rank: int
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    answers: bool = True


DispatchFn = Callable[..., list[RankCall]]
CollectFn = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A way to spread a call over a group and to join its answers."""

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    """Must be picklable (a module's function, not a lambda): a future that feeds another group is joined there."""
    row_wise: bool = False
    """Rows of a returned DataProto belong to the rows of the shard, in order: those of padding rows are cut."""


def take_rows(parts: Sequence[DataProto], start: int, stop: int) -> DataProto:
    """Rows [start, stop) of all parts in a row; touches no other rows, and copies none when one part holds them all."""
    if len(parts) == 1:
        return parts[0].slice(start, stop)
    offsets = itertools.accumulate(map(len, parts), initial=0)
    pieces = [
        part.slice(max(start - offset, 0), max(stop - offset, 0)) for part, offset in zip(parts, offsets, strict=False)
    ]
    return protocol.DataProto.concat(pieces)


def take_shard(parts: Sequence[DataProto], index: int, count: int) -> DataProto:
    """Shard `index` of `count` of the rows of all parts, padded as the module's docstring says.

    The same numbers come out on the driver and on every worker: they depend on the total of rows alone.
    """
    total = sum(len(part) for part in parts)
    if total == 0:
        raise ValueError(
            f"a data-parallel call over {count} ranks got a batch of 0 rows; leave the call out, "
            f"or use Dispatch.ONE_TO_ALL for a DataProto that carries only meta_info."
        )
    base, extra = divmod(total, count)
    start = index * base + min(index, extra)
    stop = start + base + (index < extra)
    padding = int(0 < extra <= index)
    if start == stop:  # fewer rows than ranks: the first row is padding
        shard = take_rows(parts, 0, 1)
    else:
        shard = take_rows(parts, start, stop)
        if padding:
            shard = shard[[*range(len(shard)), len(shard) - 1]]
    return replace(shard, meta_info={**shard.meta_info, PADDING_KEY: padding})


def drop_padding(output: object, args: Sequence[object]) -> object:
    """The output of a row-wise method without the rows that come from padding rows of its arguments' shards.

    A method may give k rows for each row it got (in order, the k of a row together). Other types pass as they are.
    """
    shards = [arg for arg in args if isinstance(arg, protocol.DataProto) and PADDING_KEY in arg.meta_info]
    sizes = {(len(shard), shard.meta_info[PADDING_KEY]) for shard in shards}
    if len(sizes) > 1:
        raise ValueError(
            f"the batches of one data-parallel call differ in length: shards of {sorted(sizes)} (rows, padding)."
        )
    if not isinstance(output, protocol.DataProto) or not sizes:
        return output
    rows, padding = sizes.pop()
    if padding and len(output) % rows:
        raise ValueError(
            f"got {rows} rows of which {padding} are padding, returned {len(output)}: it is unknown which of "
            f"them to drop. Return a multiple of the rows, or register the method with Dispatch.DP_COMPUTE_METRIC."
        )
    if padding and len(output):
        output = output[: len(output) // rows * (rows - padding)]
    return replace(output, meta_info={k: v for k, v in output.meta_info.items() if k != PADDING_KEY})


@dataclass(frozen=True)
class TakeShard:
    """A picklable collect function: joins as `resolver` does, then keeps one shard. Runs in the worker."""

    resolver: CollectFn
    index: int
    count: int

    def __call__(self, values: list[DataProto]) -> DataProto:
        # Joining all parts only to cut one shard out of them would copy the whole batch in every rank.
        parts = values if self.resolver is concat_rows else [self.resolver(values)]
        for part in parts:
            if not isinstance(part, protocol.DataProto):
                raise TypeError(
                    f"a data-parallel call got a future of {type(part).__name__}; it can only cut a DataProto."
                )
        return take_shard(parts, self.index, self.count)


def split_argument(value: object, count: int) -> Sequence[object]:
    """`value` for each of `count` shards: cut when it is a batch or the future of one, else the same for all."""
    if isinstance(value, protocol.DataProto):
        return [take_shard([value], index, count) for index in range(count)]
    if isinstance(value, protocol.DataProtoFuture):
        resolver = value.resolver
        return [
            protocol.DataProtoFuture(value.parts, TakeShard(resolver, index, count), value.getter)
            for index in range(count)
        ]
    return [value] * count


Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Of one rank: positional and by keyword."""


def split_arguments(args: tuple[object, ...], kwargs: dict[str, object], count: int) -> list[Arguments]:
    """The arguments of each of `count` shards."""
    values = [*args, *kwargs.values()]
    if not any(isinstance(value, protocol.DataProto | protocol.DataProtoFuture) for value in values):
        types = ", ".join(type(value).__name__ for value in values) or "no arguments"
        raise TypeError(
            f"a data-parallel call needs a DataProto or a DataProtoFuture among its arguments; got {types}."
        )
    lengths = {len(value) for value in values if isinstance(value, protocol.DataProto)}
    if len(lengths) > 1:
        raise ValueError(f"the batches of one data-parallel call differ in length: {sorted(lengths)} rows.")
    return _by_rank([split_argument(value, count) for value in values], len(args), kwargs)


def _by_rank(values: Sequence[Sequence[object]], num_args: int, names: Iterable[str]) -> list[Arguments]:
    """From each argument's value for each rank, those by keyword last, to each rank's arguments."""
    ranks = zip(*values, strict=True)
    return [(values[:num_args], dict(zip(names, values[num_args:], strict=True))) for values in ranks]


# Dispatch functions.


def _one_to_all(group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
    return [RankCall(rank, args, kwargs) for rank in range(group.world_size)]


def _first_answers(group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
    return [RankCall(rank, args, kwargs, answers=rank == 0) for rank in range(group.world_size)]


def _all_to_all(group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
    values = [*args, *kwargs.values()]
    if not any(isinstance(value, list | tuple) for value in values):
        return _one_to_all(group, *args, **kwargs)
    by_rank: list[Sequence[object]] = []
    for value in values:
        if isinstance(value, list | tuple) and len(value) == group.world_size:
            by_rank.append(value)
        else:
            found = f"{len(value)} items" if isinstance(value, list | tuple) else type(value).__name__
            raise ValueError(
                f"Dispatch.ALL_TO_ALL takes lists with one item per rank, or no list at all: "
                f"{group.name} has {group.world_size} ranks, got {found}. "
                f"For a list that every rank gets as it is, use Dispatch.ONE_TO_ALL."
            )
    return [RankCall(rank, *shard) for rank, shard in enumerate(_by_rank(by_rank, len(args), kwargs))]


def _rank_zero(group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
    return [RankCall(0, args, kwargs)]


def _data_parallel(group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
    shards = split_arguments(args, kwargs, group.world_size)
    return [RankCall(rank, *shard) for rank, shard in enumerate(shards)]


def _data_parallel_with_func(
    group: WorkerGroup, func: Callable[..., object], *args: object, **kwargs: object
) -> list[RankCall]:
    if not callable(func):
        raise TypeError(f"Dispatch.DP_COMPUTE_PROTO_WITH_FUNC needs a function first; got {type(func).__name__}.")
    return _data_parallel(group, func, *args, **kwargs)


@dataclass(frozen=True)
class _ByMesh:
    mesh_name: str

    def __call__(self, group: WorkerGroup, *args: object, **kwargs: object) -> list[RankCall]:
        mesh = group.mesh(self.mesh_name)
        collectors = sorted(place.dp_rank for place in mesh if place.is_collect)
        count = 1 + max(place.dp_rank for place in mesh)
        if collectors != list(range(count)):
            raise ValueError(
                f"mesh {self.mesh_name!r} of {group.name} needs exactly one rank with is_collect=True for each dp_rank "
                f"of 0..{count - 1}; found them for {collectors}."
            )
        shards = split_arguments(args, kwargs, count)
        by_dp_rank = sorted(enumerate(mesh), key=lambda item: item[1].dp_rank)
        return [RankCall(rank, *shards[place.dp_rank], answers=place.is_collect) for rank, place in by_dp_rank]


# Collect functions.


def as_list(outputs: list[T]) -> list[T]:
    """One item per rank, in rank order."""
    return outputs


def only_one(outputs: list[T]) -> T:
    return outputs[0]


def concat_rows(outputs: list[Any]) -> Any:
    """One DataProto of all rows when every rank gave a DataProto, else one item per rank."""
    if not all(isinstance(output, protocol.DataProto) for output in outputs):
        return outputs
    return protocol.DataProto.concat(outputs)


class Dispatch:
    """The known modes. `register_dispatch_mode` adds to them; `make_mesh_dispatch` makes one per mesh."""

    ONE_TO_ALL = DispatchMode("ONE_TO_ALL", _one_to_all, as_list)
    """Every rank gets the same arguments; the result is a list."""
    ONE_TO_ALL_FIRST_ANSWERS = DispatchMode("ONE_TO_ALL_FIRST_ANSWERS", _first_answers, only_one)
    """Every rank runs with the same arguments; the result is rank 0's, and no other is sent."""
    ALL_TO_ALL = DispatchMode("ALL_TO_ALL", _all_to_all, as_list)
    """Each argument is a list with one item per rank, or none is a list and all ranks get the same; gives a list."""
    RANK_ZERO = DispatchMode("RANK_ZERO", _rank_zero, only_one)
    """Only rank 0 runs; the result is its own."""
    DP_COMPUTE_PROTO = DispatchMode("DP_COMPUTE_PROTO", _data_parallel, concat_rows, row_wise=True)
    """DataProtos are cut into shards, anything else goes to all; DataProto results are joined, others listed."""
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", _data_parallel_with_func, concat_rows, row_wise=True
    )
    """As DP_COMPUTE_PROTO, with a function as the first argument, which every rank gets."""
    DP_COMPUTE_METRIC = DispatchMode("DP_COMPUTE_METRIC", _data_parallel, as_list)
    """Shards as in DP_COMPUTE_PROTO; the result is a list with what each rank returned, untouched."""


def register_dispatch_mode(
    name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn, *, row_wise: bool = False
) -> DispatchMode:
    """Add a mode, which is then also `Dispatch.<name>`. The same again changes nothing."""
    mode = DispatchMode(name, dispatch_fn, collect_fn, row_wise)
    if getattr(Dispatch, name, mode) != mode:
        raise ValueError(f"Dispatch.{name} exists already; choose another name.")
    setattr(Dispatch, name, mode)
    return mode


def make_mesh_dispatch(mesh_name: str) -> DispatchMode:
    """Data-parallel by the mesh that the workers registered under `mesh_name` (`Worker.register_mesh`).

    Ranks with the same `dp_rank` get the same shard; of those, the one with `is_collect` answers.
    """
    return DispatchMode(f"MESH({mesh_name})", _ByMesh(mesh_name), concat_rows, row_wise=True)
