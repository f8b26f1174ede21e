"""Dispatch modes, shards and collection, on workers that live in this process."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from paceline.protocol import DataProto, DataProtoFuture
from paceline.single_controller.base import (
    Dispatch,
    Execute,
    MeshRank,
    RankCall,
    Worker,
    WorkerContext,
    WorkerGroup,
    make_mesh_dispatch,
    register,
    register_dispatch_mode,
)
from paceline.single_controller.base.dispatch import (
    PADDING_KEY,
    CollectFn,
    TakeShard,
    concat_rows,
    drop_padding,
    split_argument,
    take_shard,
)
from paceline.single_controller.base.worker import current_context


def batch(rows: int, start: int = 0) -> DataProto:
    numbers = torch.arange(start, start + rows)
    return DataProto.from_dict({"x": numbers}, {"name": [f"row{i}" for i in numbers.tolist()]}, {"scale": 2})


def get_parts(parts: list) -> list:
    return parts


class LocalGroup(WorkerGroup):
    """Workers of this process, called one after the other through pickled arguments, as a remote group would."""

    def __init__(self, worker_cls: type, world_size: int) -> None:
        super().__init__("local", world_size)
        self.calls: list[RankCall] = []
        self.workers = []
        for rank in range(world_size):
            token = current_context.set(WorkerContext("local", "here", rank, world_size))
            self.workers.append(worker_cls())
            current_context.reset(token)
        self._bind_methods(worker_cls)

    def submit(self, method: str, calls: list[RankCall], collect_fn: CollectFn, *, row_wise: bool) -> DataProtoFuture:
        self.calls = calls
        outputs = []
        for call in calls:
            args = [arg.get() if isinstance(arg, DataProtoFuture) else arg for arg in call.args]
            output = getattr(self.workers[call.rank], method)(*args, **call.kwargs)
            if call.answers:
                outputs.append(drop_padding(output, args) if row_wise else output)
        return DataProtoFuture(outputs, pickle.loads(pickle.dumps(collect_fn)), get_parts)

    def mesh(self, name: str) -> list[MeshRank]:
        return [worker.mesh_rank(name) for worker in self.workers]


def _every_other(group: WorkerGroup, value: int) -> list[RankCall]:
    return [RankCall(rank, (value + rank,)) for rank in range(0, group.world_size, 2)]


EVERY_OTHER = register_dispatch_mode("EVERY_OTHER", _every_other, sum)


class Adder(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def where(self, greeting: str) -> str:
        return f"{greeting} {self.rank}/{self.world_size}"

    @register(Dispatch.ALL_TO_ALL)
    def add(self, a: int, b: int = 0) -> int:
        return a + b

    @register(Dispatch.RANK_ZERO)
    def leader(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def only_first(self) -> int:
        return self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shift(self, data: DataProto, by: int = 0) -> DataProto:
        rank = torch.full((len(data),), self.rank)
        return DataProto.from_dict({"y": data.batch["x"] + by, "rank": rank}, meta_info=data.meta_info)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def twice_each(self, data: DataProto) -> DataProto:
        return data.repeat(2)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def one_more(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": torch.zeros(len(data) + 1)})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return data

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, func, data: DataProto, other: DataProto | None = None) -> DataProto:
        return DataProto.from_dict({"y": func(data.batch["x"])})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> dict:
        return {"rows": len(data), "padding": data.meta_info[PADDING_KEY]}

    @register(EVERY_OTHER)
    def echo(self, value: int) -> int:
        return value


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16])
def test_shards_have_equal_sizes_and_hold_every_row_once(rows, count):
    shards = [take_shard([batch(rows)], index, count) for index in range(count)]

    assert len({len(shard) for shard in shards}) == 1
    assert all(shard.meta_info[PADDING_KEY] in (0, 1) for shard in shards)
    kept = [drop_padding(shard, [shard]) for shard in shards]
    joined = concat_rows(kept)
    assert joined.batch["x"].tolist() == list(range(rows))
    assert joined.non_tensor_batch["name"].tolist() == [f"row{i}" for i in range(rows)]
    assert joined.meta_info == {"scale": 2}


@pytest.mark.parametrize("layout", [[7], [3, 4], [1, 0, 6], [2, 2, 2, 1], [0, 7, 0]])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_shard_of_a_future_equals_the_shard_of_its_value(layout, count):
    starts = np.cumsum([0, *layout[:-1]])
    parts = [batch(rows, start) for rows, start in zip(layout, starts, strict=True)]
    future = DataProtoFuture(parts, concat_rows, get_parts)

    for index, shard in enumerate(split_argument(future, count)):
        expected = take_shard([batch(7)], index, count)
        found = shard.get()
        assert found.batch["x"].tolist() == expected.batch["x"].tolist()
        assert found.non_tensor_batch["name"].tolist() == expected.non_tensor_batch["name"].tolist()
        assert found.meta_info == expected.meta_info


def test_a_shard_of_a_chunk_or_a_concatenation_of_futures():
    future = DataProtoFuture([batch(8)], concat_rows, get_parts)
    second_half = split_argument(future.chunk(2)[1], 2)
    assert [shard.get().batch["x"].tolist() for shard in second_half] == [[4, 5], [6, 7]]
    both = split_argument(DataProtoFuture.concat([future, future]), 2)
    assert both[1].get().batch["x"].tolist() == list(range(8))


def test_a_shard_that_lies_in_one_part_is_not_copied():
    parts = [batch(4), batch(4, 4)]
    shard = TakeShard(concat_rows, 1, 2)(parts)
    assert shard.batch["x"].data_ptr() == parts[1].batch["x"].data_ptr()


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="batch of 0 rows"):
        LocalGroup(Adder, 2).shift(batch(4)[:0])


def test_one_to_all_gives_a_list_in_rank_order():
    assert LocalGroup(Adder, 3).where("hi") == ["hi 0/3", "hi 1/3", "hi 2/3"]


def test_all_to_all_gives_each_rank_its_item():
    group = LocalGroup(Adder, 2)
    assert group.add([1, 2], b=[10, 20]) == [11, 22]
    with pytest.raises(ValueError, match=r"local has 2 ranks, got 3 items"):
        group.add([1, 2, 3])
    with pytest.raises(ValueError, match=r"local has 2 ranks, got int"):
        group.add([1, 2], b=10)


def test_rank_zero_runs_one_rank_and_gives_its_answer():
    group = LocalGroup(Adder, 3)
    assert group.leader() == 0
    assert len(group.calls) == 1
    assert group.only_first() == 0
    assert len(group.calls) == 1


@pytest.mark.parametrize("rows", [1, 2, 7, 9])
def test_data_parallel_results_come_back_in_order_without_padding(rows):
    result = LocalGroup(Adder, 3).shift(batch(rows), by=100)
    assert result.batch["y"].tolist() == [100 + i for i in range(rows)]
    assert result.batch["rank"].tolist() == sorted(result.batch["rank"].tolist())
    assert result.meta_info == {"scale": 2}


def test_padding_of_expanded_rows_is_cut_too():
    result = LocalGroup(Adder, 3).twice_each(batch(4))
    assert result.batch["x"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_padding_that_can_not_be_recognised_is_an_error():
    group = LocalGroup(Adder, 2)
    assert len(group.one_more(batch(4))) == 6
    with pytest.raises(ValueError, match="got 2 rows of which 1 are padding, returned 3"):
        group.one_more(batch(3))


def test_metrics_come_as_a_list_and_see_the_padding():
    counts = LocalGroup(Adder, 3).count(batch(7))
    assert counts == [{"rows": 3, "padding": 0}, {"rows": 3, "padding": 1}, {"rows": 3, "padding": 1}]


def test_data_parallel_with_a_function():
    group = LocalGroup(Adder, 2)
    assert group.apply(torch.square, batch(3)).batch["y"].tolist() == [0, 1, 4]
    with pytest.raises(TypeError, match="needs a function first; got DataProto"):
        group.apply(batch(3), torch.square)


def test_data_parallel_calls_need_batches_of_one_length():
    group = LocalGroup(Adder, 2)
    with pytest.raises(TypeError, match="needs a DataProto"):
        group.count(3)
    with pytest.raises(ValueError, match=r"differ in length: \[3, 4\]"):
        group.apply(torch.square, batch(3), batch(4))


def test_futures_of_other_lengths_are_noticed_in_the_worker():
    future = DataProtoFuture([batch(8)], concat_rows, get_parts)
    with pytest.raises(ValueError, match=r"differ in length: shards of \[\(2, 0\), \(4, 0\)\]"):
        LocalGroup(Adder, 2).apply(torch.square, batch(4), future)


def test_a_future_feeds_another_group_of_another_size():
    future = LocalGroup(Adder, 3).later(batch(7))
    assert isinstance(future, DataProtoFuture)
    result = LocalGroup(Adder, 2).shift(future)
    assert result.batch["y"].tolist() == list(range(7))


def test_a_future_of_then_feeds_another_group():
    future = LocalGroup(Adder, 3).later(batch(7)).then(lambda data: data[::-1])
    assert LocalGroup(Adder, 2).shift(future).batch["y"].tolist() == list(reversed(range(7)))


def test_a_registered_mode_is_an_attribute_of_dispatch():
    assert Dispatch.EVERY_OTHER is EVERY_OTHER
    assert LocalGroup(Adder, 5).echo(1) == 1 + 3 + 5
    with pytest.raises(ValueError, match=r"Dispatch.ONE_TO_ALL exists already"):
        register_dispatch_mode("ONE_TO_ALL", _every_other, sum)


class TensorParallel(Worker):
    """Pairs of ranks share a shard; the second of a pair answers."""

    def __init__(self) -> None:
        self.register_mesh("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 1)
        self.register_mesh("mute", dp_rank=self.rank // 2, is_collect=self.rank == 0)

    @register(make_mesh_dispatch("pairs"))
    def run(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(make_mesh_dispatch("mute"))
    def run_mute(self, data: DataProto) -> DataProto:
        return data

    @register(make_mesh_dispatch("unknown"))
    def run_unknown(self, data: DataProto) -> DataProto:
        return data


def test_ranks_of_one_mesh_group_get_the_same_shard_and_one_answers():
    group = LocalGroup(TensorParallel, 4)
    result = group.run(batch(3))
    assert result.batch["x"].tolist() == [0, 1, 2]
    assert result.batch["rank"].tolist() == [1, 1, 3]
    shards = {call.rank: call.args[0] for call in group.calls}
    assert shards[0] is shards[1]
    assert shards[2] is shards[3]
    assert {call.rank for call in group.calls if call.answers} == {1, 3}


def test_a_mesh_without_a_collector_for_a_shard_is_an_error():
    with pytest.raises(
        ValueError, match=r"exactly one rank with is_collect=True for each dp_rank of 0\.\.1; found them"
    ):
        LocalGroup(TensorParallel, 4).run_mute(batch(4))


def test_a_mesh_that_was_not_registered_is_an_error():
    with pytest.raises(KeyError, match=r"'unknown' was not registered \(registered: mute, pairs\)"):
        LocalGroup(TensorParallel, 4).run_unknown(batch(4))


def test_a_batch_with_auto_padding_comes_back_without_its_padding():
    data = DataProto.from_dict({"x": torch.arange(5)}, {"name": list("abcde")}, {"scale": 2}, auto_padding=True)
    group = LocalGroup(Adder, 4)
    assert group.shift(data).batch["y"].tolist() == [0, 1, 2, 3, 4]
    assert len(group.shift(data)) == 5


def test_a_dispatch_mode_may_be_registered_again_but_not_replaced():
    assert register_dispatch_mode("EVERY_OTHER", _every_other, sum) == EVERY_OTHER
    with pytest.raises(ValueError, match=r"Dispatch\.EVERY_OTHER exists already"):
        register_dispatch_mode("EVERY_OTHER", _every_other, list)
