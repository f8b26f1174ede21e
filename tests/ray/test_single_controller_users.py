"""Workers as users write them, on a real Ray: they write to arguments, wait in coroutines, share a pool."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
import ray
import torch

from paceline.errors import ResourceError, StorageError, WorkerError
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

ROWS = 50_000
"""Enough for the object store: small batches travel inside of messages and are nobody else's anyway."""


def batch(rows: int = ROWS) -> DataProto:
    return DataProto.from_dict({"a": torch.zeros(rows)}, {"n": np.zeros(rows)}, {"w": torch.zeros(rows)})


class Base(Worker):
    """Stands for a class of paceline's own."""

    leaves_inputs_alone = True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def read(self, data: DataProto) -> list[float]:
        return [float(data.batch["a"].sum()), float(data.non_tensor_batch["n"].sum())]

    @register(Dispatch.ONE_TO_ALL)
    def is_shared(self, data: DataProto) -> bool:
        return not data.non_tensor_batch["n"].flags.writeable

    @register(Dispatch.ONE_TO_ALL)
    def with_hook(self, data: DataProto) -> None:
        self.hook(data)

    def hook(self, data: DataProto) -> None: ...


class OfAUser(Base):
    def __init__(self) -> None:
        self.log: list[str] = []

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def add(self, data: DataProto) -> float:
        data.batch["a"] += 1
        data.batch["a"].add_(1)
        data.batch["a"][0] = 3
        data.non_tensor_batch["n"][0] = 3
        data.meta_info["w"] += 1
        return float(data.batch["a"].sum() + data.non_tensor_batch["n"].sum() + data.meta_info["w"].sum())

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        data.batch["a"] *= 2
        return data

    @register(Dispatch.ONE_TO_ALL)
    def is_mine_shared(self, data: DataProto) -> bool:
        return not data.non_tensor_batch["n"].flags.writeable

    def hook(self, data: DataProto) -> None:
        data.batch["a"][0] = 3

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def wait(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.log.append(name)

    @register()
    def take_log(self) -> list[str]:
        return self.log

    @register()
    def refuse(self) -> None:
        raise StorageError("no room")

    def place(self, prefix: str = "") -> str:  # not registered
        return f"{prefix}{self.rank}"

    @register()
    def environment(self, name: str) -> tuple[str, int, list]:
        return os.environ.get(name, ""), os.getpid(), ray.get_gpu_ids()

    @register(blocking=False)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return time.time()


@pytest.fixture(scope="module")
def ray_session():
    variables = {"FROM_THE_JOB": "kept"}
    options = {"include_dashboard": False, "log_to_driver": False, "runtime_env": {"env_vars": variables}}
    ray.init("local", num_cpus=4, num_gpus=2, **options)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def two(ray_session):
    pool = RayResourcePool([2], use_gpu=False, name_prefix="two", cpus_per_device=0.5)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), "two", worker_env={"MINE": "set"})
    yield group
    group.shutdown()


def test_a_worker_that_writes_to_its_columns_changes_nobody_elses(two):
    data = batch()
    expected = 2.0 * (ROWS - 1) + 3 + 3 + ROWS
    assert two.add(data).get() == [expected, expected]
    assert two.execute_all_sync("add", data) == [expected, expected]
    doubled = two.double(DataProto.from_dict({"a": torch.ones(ROWS)}))
    assert doubled.batch["a"].unique().tolist() == [2.0]


def test_a_future_that_one_call_writes_to_is_unchanged_for_the_next(two):
    sent = two.execute_rank_zero_async("double", batch())
    two.add(sent).get()
    assert two.read(sent).get() == [[0.0, 0.0], [0.0, 0.0]]


def test_inherited_methods_of_our_classes_get_no_copies_and_are_checked(two):
    assert two.is_shared(batch()) == [True, True]
    assert two.is_mine_shared(batch()) == [False, False]
    with pytest.raises(WorkerError, match=r"changed in place: 0\.a"):
        two.with_hook(batch())


def test_coroutines_keep_the_order_of_calls(two):
    two.wait("slow", 0.3)
    two.wait("quick", 0.0)
    assert two.take_log() == [["slow", "quick"]] * 2


def test_methods_are_called_by_name(two):
    assert two.execute_all_sync("place", prefix="rank ") == ["rank 0", "rank 1"]
    assert two.execute_all_async("place", ["a", "b"]).get() == ["a0", "b1"]
    assert two.execute_all("place").get() == ["0", "1"]
    assert two.execute_rank_zero_sync("place", "only ") == "only 0"
    assert two.execute_rank_zero("place").get() == "0"


def test_the_type_of_an_exception_comes_with_the_error(two):
    with pytest.raises(WorkerError) as caught:
        two.refuse()
    assert caught.value.caused_by(StorageError)
    assert caught.value.remote_cause.message == "no room"


def test_variables_of_a_group_join_those_of_the_job(two):
    assert [found[0] for found in two.environment("MINE")] == ["set", "set"]
    assert [found[0] for found in two.environment("FROM_THE_JOB")] == ["kept", "kept"]
    pool = RayResourcePool([1], use_gpu=False)
    with pytest.raises(ValueError, match="worker_env sets OMP_NUM_THREADS, RANK"):
        RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), worker_env={"RANK": "1", "OMP_NUM_THREADS": "1"})
    with pytest.raises(TypeError, match="needs texts as values; these are not: A"):
        RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), worker_env={"A": 1})


def test_a_pool_holds_as_many_groups_as_it_was_told(ray_session):
    pool = RayResourcePool([2], True, "shared", 2, cpus_per_device=0.5)
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), name) for name in ("first", "second")]
    try:
        found = [group.environment("MINE") for group in groups]
        assert len({pid for ranks in found for _, pid, _ in ranks}) == 4
        for ranks in found:  # the ranks of a group are on different devices
            assert sorted(gpu for _, _, gpus in ranks for gpu in gpus) == [0, 1]
        started = time.time()
        ends = [group.sleep(1.0) for group in groups]
        assert max(end for future in ends for end in future.get()) - started < 1.9, "they do not run side by side"
        with pytest.raises(ResourceError, match=r"third wants .* in use by first, second.*max_colocate_count=2"):
            RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), "third")
        groups.pop().shutdown()
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(OfAUser), "third"))
        assert groups[-1].execute_all_sync("place") == ["0", "1"]
    finally:
        for group in groups:
            group.shutdown()


def test_accelerators_of_several_nodes_are_shared_in_pools_of_their_own():
    with pytest.raises(ValueError, match="make a pool of each node with max_colocate_count=2, and merge them"):
        RayResourcePool([2, 2], max_colocate_count=2)
    with pytest.raises(ValueError, match="max_colocate_count must be 1 or more"):
        RayResourcePool([2], max_colocate_count=0)
