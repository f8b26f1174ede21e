"""A worker that writes to its arguments changes nobody else's, and paceline's own get them without a copy."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.base.calls import leaves_inputs_alone, run_method
from paceline.single_controller.base.worker import registered_methods
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool
from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from paceline.workers.reward_worker import RewardWorker


def batch() -> DataProto:
    return DataProto.from_dict(
        {"a": torch.zeros(2)},
        {"n": np.zeros(2), "cells": [[0], [0]]},
        {"weights": torch.zeros(2), "notes": []},
    )


def content(data: DataProto) -> tuple:
    lists = [data.batch["a"].tolist(), data.non_tensor_batch["n"].tolist(), data.meta_info["weights"].tolist()]
    return (*lists, data.non_tensor_batch["cells"].tolist(), data.meta_info["notes"], set(data.batch.keys()))


class Writer(Worker):
    """Written as by someone who knows nothing of shared memory."""

    def __init__(self) -> None:
        self.kept = torch.zeros(2)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, data: DataProto) -> float:
        data.batch["a"] += 1
        return float(data.batch["a"][0])

    @register(Dispatch.ONE_TO_ALL)
    def write_everywhere(self, data: DataProto, more: dict, array: np.ndarray, tensor: torch.Tensor) -> DataProto:
        data.batch["a"].add_(1)
        data.batch["a"][0] = 3
        data.batch["new"] = data.batch["a"]
        data.non_tensor_batch["n"][0] = 3
        data.non_tensor_batch["cells"][0].append(3)
        data.meta_info["weights"].mul_(0).add_(3)
        data.meta_info["notes"].append("written")
        more["nested"][0].batch["a"].fill_(3)
        array += 1
        tensor.zero_()
        return data

    @register(Dispatch.ONE_TO_ALL)
    def give_back(self, data: DataProto) -> DataProto:
        self.given = data
        return data

    @register(Dispatch.ONE_TO_ALL)
    def write_to_what_was_given_back(self) -> None:
        self.given.batch["a"].fill_(9)

    @register(Dispatch.ONE_TO_ALL)
    def give_own(self) -> torch.Tensor:
        self.kept += 1
        return self.kept

    @register(Dispatch.ONE_TO_ALL)
    def take_anything(self, value: object) -> None: ...


class Careful(Worker):
    """As paceline's own are."""

    leaves_inputs_alone = True

    @register(Dispatch.ONE_TO_ALL)
    def same_memory(self, data: DataProto, address: int) -> bool:
        return data.batch["a"].data_ptr() == address

    @register(Dispatch.ONE_TO_ALL)
    def with_hook(self, data: DataProto) -> DataProto:
        self.hook(data)
        return data

    @register(Dispatch.ONE_TO_ALL)
    def replace_columns(self, data: DataProto) -> list[str]:
        data.pop(["a"], ["n"], ["weights"])
        data.batch["a"] = torch.ones(2)
        return list(data.batch.keys())

    def hook(self, data: DataProto) -> None: ...


class OfAUser(Careful):
    @register(Dispatch.ONE_TO_ALL)
    def own_same_memory(self, data: DataProto, address: int) -> bool:
        return data.batch["a"].data_ptr() == address

    def hook(self, data: DataProto) -> None:
        if self.rank == 0:
            data.batch["a"][0] = 3


class Overriding(Careful):
    def same_memory(self, data: DataProto, address: int) -> bool:
        return super().same_memory(data, address)


def in_process(cls: type) -> InProcessWorkerGroup:
    pool = RayResourcePool([1], use_gpu=False, name_prefix="pool")
    return InProcessWorkerGroup(pool, RayClassWithInitArgs(cls), "worker")


def test_two_ranks_that_write_to_one_batch_both_see_it_as_it_was_sent():
    data = batch()
    assert [run_method(Writer(), "add", [data], {}) for _ in range(2)] == [1.0, 1.0]
    assert data.batch["a"].tolist() == [0.0, 0.0]


def test_nothing_that_a_users_worker_writes_is_seen_outside():
    group, data, more = in_process(Writer), batch(), {"nested": [batch()]}
    array, tensor = np.zeros(2), torch.ones(2)
    array.setflags(write=False)  # as arrays that come through Ray are
    for _ in range(2):
        (written,) = group.write_everywhere(data, more, array, tensor)
        assert written.batch["a"].tolist() == [3.0, 1.0]
        assert written.meta_info["notes"] == ["written"]
    assert content(data) == content(batch())
    assert content(more["nested"][0]) == content(batch())
    assert (array.tolist(), tensor.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_what_a_users_worker_gives_back_or_keeps_is_not_shared():
    group, data = in_process(Writer), batch()
    (given,) = group.give_back(data)
    given.batch["a"].fill_(5)
    group.write_to_what_was_given_back()
    assert (given.batch["a"].tolist(), data.batch["a"].tolist()) == ([5.0, 5.0], [0.0, 0.0])
    first, second = group.give_own()[0], group.give_own()[0]
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_class_that_leaves_its_inputs_alone_gets_no_copies():
    data = batch()
    address = data.batch["a"].data_ptr()
    assert in_process(Careful).same_memory(data, address) == [True]


def test_the_class_that_defines_a_method_decides_whether_it_gets_copies():
    data = batch()
    address = data.batch["a"].data_ptr()
    group = in_process(OfAUser)
    assert group.same_memory(data, address) == [True]
    assert group.own_same_memory(data, address) == [False]
    assert in_process(Overriding).same_memory(data, address) == [False]


def test_a_users_hook_in_an_inherited_method_that_writes_is_noticed():
    with pytest.raises(RuntimeError, match=r"changed in place: 0\.a\. Clone"):
        in_process(OfAUser).with_hook(batch())
    assert content(in_process(Careful).with_hook(batch())[0]) == content(batch())


def test_columns_that_are_replaced_and_not_written_to_are_no_error():
    assert run_method(OfAUser(), "replace_columns", [batch()], {}) == ["a"]
    assert run_method(Careful(), "replace_columns", [batch()], {}, check_inputs=True) == ["a"]


def test_a_method_put_on_the_worker_itself_gets_copies():
    worker = Careful()
    worker.same_memory = lambda data, address: data.batch["a"].data_ptr() == address
    data = batch()
    assert not run_method(worker, "same_memory", [data, data.batch["a"].data_ptr()], {})


def test_an_argument_that_cannot_be_copied_is_refused_with_the_remedy():
    with pytest.raises(
        TypeError, match=r"Writer\.take_anything .* Set leaves_inputs_alone = True in the body of Writer"
    ):
        in_process(Writer).take_anything(threading.Lock())


@pytest.mark.parametrize("cls", [ActorRolloutRefWorker, TrainingWorker])
def test_our_workers_take_every_batch_without_a_copy(cls):
    worker = object.__new__(cls)
    methods = registered_methods(cls)
    assert len(methods) > 5
    assert [method for method in methods if not leaves_inputs_alone(worker, method)] == []


def test_reward_functions_of_users_get_copies():
    def reward(data: DataProto, return_dict: bool) -> dict:
        data.batch["responses"].zero_()
        return {"reward_tensor": torch.ones(2, 3)}

    data = DataProto.from_dict({name: torch.ones(2, 3) for name in ("responses", "response_mask")})
    run_method(RewardWorker(reward, None), "compute_reward", [data], {})
    assert data.batch["responses"].sum() == 6


class Waiting(Worker):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.loops: set[int] = set()

    @register(Dispatch.ONE_TO_ALL)
    async def slow(self, seconds: float) -> str:
        self.loops.add(id(asyncio.get_running_loop()))
        self.log.append(f"begin {seconds}")
        await asyncio.sleep(seconds)
        self.log.append(f"end {seconds}")
        return self.role

    @register(Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[list[str], int]:
        return self.log, len(self.loops)

    @register(Dispatch.ONE_TO_ALL)
    async def fails(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("in a coroutine")


def test_coroutines_are_run_to_their_end_in_order():
    group = in_process(Waiting)
    assert group.slow(0.02) == ["worker"]
    group.slow(0.0)
    assert group.seen() == [(["begin 0.02", "end 0.02", "begin 0.0", "end 0.0"], 1)]
    with pytest.raises(ValueError, match="in a coroutine"):
        group.fails()


def test_a_call_that_needs_no_dispatch_mode_reaches_every_rank():
    group = in_process(Waiting)
    assert group.execute_all_sync("slow", 0.0) == ["worker"]
    assert group.execute_all_async("slow", seconds=[0.0]).get() == ["worker"]
    assert group.execute_all("slow", 0.0).get() == ["worker"]
    assert group.execute_rank_zero_sync("slow", 0.0) == "worker"
    assert group.execute_rank_zero("slow", 0.0).get() == "worker"
    assert group.execute_rank_zero_async("slow", 0.0).get() == "worker"
