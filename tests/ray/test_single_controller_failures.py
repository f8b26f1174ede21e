"""What the driver is told when a worker raises, dies or falls silent, and when a pool does not fit."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import psutil
import pytest
import ray
import torch
import torch.distributed

from paceline.errors import ResourceError, WorkerError
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    drain_call_records,
    limited_wait,
    watch,
)

MEMORY = r"\d+\.\d GB resident, node \d+\.\d of \d+\.\d GB free"


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


class Fragile(Worker):
    def __init__(self, fail_in_constructor: bool = False) -> None:
        if fail_in_constructor and self.rank == 1:
            raise OSError("no such model")

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute(self, data: DataProto, fail_on_rank: int = -1) -> DataProto:
        if self.rank == fail_on_rank:
            self._divide(data)
        return data

    def _divide(self, data: DataProto) -> float:
        return len(data) / 0  # the line to look for

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def use(self, value: object) -> None: ...

    @register(Dispatch.ONE_TO_ALL)
    def unpicklable(self) -> threading.Lock:
        return threading.Lock()

    @register(Dispatch.ONE_TO_ALL)
    def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def join_gloo(self) -> None:
        torch.distributed.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def collective(self) -> None:
        if self.rank == 1:
            print("the barrier is late", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(600)
        torch.distributed.barrier()


def cpu_pool(*devices: int, name: str, **options) -> RayResourcePool:
    return RayResourcePool(list(devices), use_gpu=False, name_prefix=name, **options)


def start(name: str, devices: int = 2, **options) -> RayWorkerGroup:
    return RayWorkerGroup(cpu_pool(devices, name=f"{name}_pool"), RayClassWithInitArgs(Fragile), name, **options)


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def steady():
    """A group that survives this module's tests."""
    group = start("steady", devices=2)
    yield group
    group.shutdown()


def test_an_exception_arrives_with_role_rank_method_and_its_traceback(steady):
    with pytest.raises(WorkerError) as caught:
        steady.compute(batch(4), fail_on_rank=1).get()
    error = caught.value
    assert type(error) is WorkerError
    assert (error.role, error.rank, error.method) == ("steady", 1, "compute")
    assert error.message == "ZeroDivisionError: division by zero"
    assert "len(data) / 0  # the line to look for" in error.remote_traceback
    assert "in _divide" in error.remote_traceback


def test_a_failure_is_told_once_and_the_group_goes_on(steady):
    failing = steady.compute(batch(4), fail_on_rank=0)
    dependent = steady.compute(failing)
    with pytest.raises(WorkerError):
        failing.get()
    assert len(steady.compute(batch(3)).get()) == 3
    with pytest.raises(WorkerError) as caught:
        dependent.get()
    assert (caught.value.rank, caught.value.method) == (0, "compute")
    assert len(drain_call_records()) > 0


def test_a_failure_nobody_asked_for_is_told_while_waiting_for_something_else(steady):
    steady.compute(batch(4), fail_on_rank=1)
    waited = steady.sleep(1.0)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        waited.get()
    waited.get()


def test_a_result_that_cannot_be_sent_is_a_worker_error(steady):
    with pytest.raises(WorkerError, match="pickle") as caught:
        steady.unpicklable()
    assert (caught.value.role, caught.value.method) == ("steady", "unpicklable")


def test_a_long_wait_says_what_it_waits_for(steady, monkeypatch, caplog):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(watch, "REPORT_SECONDS", 0.5)
    with caplog.at_level("WARNING", logger=watch.__name__):
        steady.sleep(1.3).get()
    assert len(caplog.messages) == 2
    assert "steady.sleep (ranks 0, 1)" in caplog.messages[0]


def test_a_constructor_that_fails_is_named_and_gives_its_devices_back(steady):
    cls = RayClassWithInitArgs(Fragile, fail_in_constructor=True)
    with pytest.raises(WorkerError) as caught:
        RayWorkerGroup(cpu_pool(2, name="broken"), cls, "broken")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("broken", 1, "__init__")
    assert caught.value.message == "OSError: no such model"
    deadline = time.monotonic() + 10.0
    while ray.available_resources().get("CPU", 0.0) < 2.0:
        assert time.monotonic() < deadline, "the placement group was not removed"
        time.sleep(0.1)


def test_a_killed_worker_is_named_while_its_peer_is_stuck_in_a_collective(steady):
    group = start("doomed")
    pids = group.pid()
    group.join_gloo()
    stuck = group.collective()
    other = steady.sleep(15.0)
    dependent = steady.use(stuck)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        other.get()  # the driver waits for another group
    assert time.monotonic() - started < 10.0
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("doomed", 1, "collective")
    said = rf"its process \(pid {pids[1]} on [\d.]+\) was killed by SIGKILL, .*; last seen \d+ s before: {MEMORY}"
    assert re.fullmatch(said, caught.value.message)
    assert caught.value.remote_traceback == "last lines of its stderr:\nthe barrier is late\n"
    for future in (stuck, dependent):
        with pytest.raises(WorkerError, match="doomed rank 1 failed in collective"):
            future.get()

    group.shutdown()
    wait_until_gone(pids)
    steady.pid()  # what the dead group owed does not come up again


def test_a_killed_worker_is_named_with_the_call_that_it_was_at():
    """Ray fails the calls that wait behind it in no order."""
    group = start("busy", devices=1)
    (pid,) = group.pid()
    group.sleep(60.0)
    waiting = [group.use(None) for _ in range(200)]
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"busy rank 0 failed in sleep: its process .* was killed by SIGKILL"):
        waiting[0].get()
    group.shutdown()


def test_the_signal_that_ended_a_worker_is_named():
    group = start("brief", devices=1)
    with pytest.raises(WorkerError, match=r"was ended by SIGSEGV; last seen .*\n.*\n?.*SIGSEGV received"):
        group.segfault()
    group.shutdown()


def test_a_wait_can_be_limited(steady):
    slow = steady.sleep(3.0)
    with (
        pytest.raises(WorkerError, match="steady rank 0 failed in sleep: no answer in the time that was left"),
        limited_wait(0.5),
    ):
        slow.get()
    slow.get()


def test_a_stopped_worker_is_noticed_by_its_silence():
    group = start("silent", devices=1, heartbeat_timeout_seconds=3.0)
    (pid,) = group.pid()
    group.sleep(4.5).get()  # a busy worker beats
    pending = group.sleep(60.0)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"no heartbeat for \d+ s \(pid") as caught:
        pending.get()
    assert 2.0 < time.monotonic() - started < 15.0
    assert re.search(rf"It was last seen \d+ s before: {MEMORY}\.", caught.value.message)
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("silent", 0, "sleep")
    group.shutdown()
    wait_until_gone([pid])


@pytest.mark.parametrize(
    ("devices", "cpus_per_device", "wanted"),
    [
        ((5,), 1.0, "wanted: 5 devices of 1 CPU each, on one node"),
        ((2,), 3.0, "wanted: 2 devices of 3 CPU each, on one node"),
        ((1, 1), 1.0, "wanted: 1 + 1 devices of 1 CPU each, on 2 different nodes"),
    ],
)
def test_a_pool_that_can_never_fit_fails_at_once_with_a_table(steady, devices, cpus_per_device, wanted):
    pool = cpu_pool(*devices, name="large", cpus_per_device=cpus_per_device)
    started = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))
    assert time.monotonic() - started < 5.0
    text = str(caught.value)
    assert "pool 'large' can never fit this cluster" in text
    assert wanted in text
    assert "devices free / total   CPU free / total" in text
    assert "2 / 4" in text  # the steady group holds two of four CPUs
    assert "steady_pool: {'CPU': 2.0}" in text


def test_a_pool_of_accelerators_that_nobody_has_fails_at_once():
    for device_name, resource in (("cuda", "GPU"), ("npu", "NPU")):
        pool = RayResourcePool([1], use_gpu=True, name_prefix="fast", device_name=device_name)
        with pytest.raises(ResourceError, match=f"1 devices of 1 CPU \\+ 1 {resource} each"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))


def test_a_pool_that_others_hold_fails_in_time_and_leaves_nothing_behind(steady):
    started = time.monotonic()
    with pytest.raises(ResourceError, match="was not free within 3 s"):
        RayWorkerGroup(cpu_pool(3, name="late"), RayClassWithInitArgs(Fragile), ready_timeout_seconds=3.0)
    assert time.monotonic() - started < 10.0
    states = {entry["name"]: entry["state"] for entry in ray.util.placement_group_table().values()}
    assert states["late"] == "REMOVED"
    assert steady.pid()
