"""Large columns of answers stay where they were made: what the driver reads comes to it, and nothing else."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import ray
import torch
from ray._private.internal_api import memory_summary

from paceline.errors import WorkerError
from paceline.protocol import DataProto
from paceline.protocol.held import HeldColumn
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from paceline.single_controller.ray.column_store import ObjectStore
from paceline.single_controller.ray.object_rows import ObjectRows

WIDTH = 5000


def numbers(rows: torch.Tensor) -> torch.Tensor:
    """A row of numbers without a pattern for each number, which is its first one."""
    found = ((rows[:, None] * 7919 + torch.arange(WIDTH) ** 2 * 104_729) % 10_007).float()
    found[:, 0] = rows
    return found


class Maker(Worker):
    leaves_inputs_alone = True

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, data: DataProto) -> DataProto:
        """Columns of 20 and 40 KB a row, and a mask."""
        rows = data.batch["row"]
        large = numbers(rows)
        mask = (torch.arange(WIDTH) <= rows[:, None]).long()
        return DataProto.from_dict({"row": rows, "large": large, "ids": large.long(), "mask": mask})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, data: DataProto) -> DataProto:
        assert not any(isinstance(column, HeldColumn) for column in data._columns().values())
        return DataProto.from_dict({"twice": data.batch["large"] * 2, "row": data.batch["row"]})

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Writer(Worker):
    """A user's class: it may write to what it gets."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def spoil(self, data: DataProto) -> DataProto:
        data.batch["large"].zero_()
        return data


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    environment = {"env_vars": {"PACELINE_CHECK_INPUTS": "1"}}
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def start(name: str, cls: type[Worker] = Maker, devices: int = 2) -> RayWorkerGroup:
    return RayWorkerGroup(
        RayResourcePool([devices], use_gpu=False, name_prefix=f"{name}_pool"), RayClassWithInitArgs(cls), name
    )


@pytest.fixture(scope="module")
def makers() -> Iterator[RayWorkerGroup]:
    group = start("makers")
    yield group
    group.shutdown()


@pytest.fixture
def fetched(monkeypatch) -> list[int]:
    """The bytes of each column, or part of one, that this process fetches."""
    found: list[int] = []
    real = ObjectRows.fetch.__func__

    def fetch(cls, wanted):
        tensors = real(cls, wanted)
        found.extend(tensor.nbytes for tensor in tensors)
        return tensors

    monkeypatch.setattr(ObjectRows, "fetch", classmethod(fetch))
    return found


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(count)})


def test_the_driver_passes_rows_of_several_makers_on_without_fetching_them(makers, fetched):
    made = makers.make(rows(61)).get()
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    doubled = makers.double(made.select(["large", "row"])[order]).get()  # 61 rows over 2 ranks: one is padding
    assert doubled.batch["row"].tolist() == order.tolist()
    lengths = made.batch["mask"].sum(dim=1)
    assert lengths.tolist() == [number + 1 for number in range(61)]
    assert fetched == []
    expected = 2 * numbers(order)
    assert torch.equal(doubled.batch["twice"], expected)
    assert sum(fetched) == expected.nbytes


def test_a_future_goes_from_one_call_to_the_next_without_the_driver(makers, fetched):
    doubled = makers.double(makers.make(rows(8)))
    assert doubled.get().batch["row"].tolist() == list(range(8))
    assert fetched == []


def test_without_a_store_every_column_comes_and_is_the_same(makers, fetched):
    left = makers.make(rows(9)).get()
    carried_by = start("carriers", devices=1)
    carried_by.column_store = None
    carried = carried_by.make(rows(9)).get()
    assert all(isinstance(column, torch.Tensor) for column in carried._columns().values())
    for name, column in carried.batch.items():
        assert torch.equal(left.batch[name], column)
    carried_by.shutdown()


def test_small_columns_come_with_the_answer(makers):
    made = makers.make(rows(9)).get()
    assert isinstance(made._columns()["row"], torch.Tensor)
    assert isinstance(made._columns()["large"], HeldColumn)


def test_a_worker_that_writes_to_its_inputs_changes_nothing_of_others(makers):
    made = makers.make(rows(4)).get()
    writers = start("writers", Writer)
    spoilt = writers.spoil(made)
    assert not spoilt.batch["large"].any()
    assert torch.equal(made.batch["large"][:, 0], torch.arange(4.0))
    writers.shutdown()


def stored_megabytes() -> int:
    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    return int(re.search(r"Plasma memory usage (\d+) MiB", text)[1])


def test_what_no_batch_names_any_more_is_freed(makers):
    gc.collect()
    before = stored_megabytes()
    made = makers.make(rows(1000)).get()
    assert len(made._columns()["ids"].sources) > 100
    part = made[:2].select(["large"])
    assert stored_megabytes() - before > 50
    del made
    deadline = time.monotonic() + 30
    while stored_megabytes() - before > 5 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert stored_megabytes() - before <= 5
    assert part.batch["large"][:, 0].tolist() == [0.0, 1.0]


def error_of(read: Callable[[], object], seconds: float = 30.0) -> WorkerError:
    """What reading ends in soon: what lies on this node may be there for a moment after its owner's end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            read()
        except WorkerError as error:
            return error
        time.sleep(0.2)
    raise AssertionError("the columns are still there")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)


@pytest.fixture
def mortal() -> Iterator[RayWorkerGroup]:
    group = start("mortal")
    yield group
    group.shutdown()


def test_columns_of_a_dead_worker_are_missed_by_its_name(makers, mortal):
    made = mortal.make(rows(8)).get()
    kill(mortal.pid()[1])
    of_call = error_of(lambda: makers.double(made.select(["large", "row"])).get())
    of_read = error_of(lambda: made[4:].batch["large"].sum())
    for error in (of_call, of_read):
        assert (error.role, error.rank, error.method) == ("mortal", 1, "make")
        assert "columns of its answer stayed in its process's care" in str(error)
    assert made[:4].batch["large"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]  # of the rank that lives
    assert makers.double(made[:4].select(["large", "row"])).get().batch["row"].tolist() == [0, 1, 2, 3]


def test_a_death_under_a_call_is_told_and_not_the_columns_that_went_with_it(mortal):
    made = mortal.make(rows(8)).get()
    pid = mortal.pid()[1]
    os.kill(pid, signal.SIGSTOP)
    waits = mortal.double(made)
    kill(pid)
    error = error_of(lambda: made[4:].batch["large"].sum())
    assert (error.role, error.rank, error.method) == ("mortal", 1, "double")
    del waits


def test_the_store_of_a_group_says_what_is_large():
    assert RayWorkerGroup.column_store == ObjectStore(32_000)
