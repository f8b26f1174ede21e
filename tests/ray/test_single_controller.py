"""Worker groups on a real Ray: dispatch, futures between groups, colocated roles, pools, records."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
import torch.distributed

from paceline.errors import ResourceError, WorkerError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.single_controller.base import (
    Dispatch,
    Execute,
    RankCall,
    Worker,
    WorkerGroup,
    call_tag,
    make_mesh_dispatch,
    register,
    register_dispatch_mode,
)
from paceline.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    drain_call_records,
)
from paceline.single_controller.ray.watch import CallWatch


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"name": [f"row{i}" for i in range(rows)]}, {"scale": 2})


def _last_rank_only(group: WorkerGroup, value: int) -> list[RankCall]:
    return [RankCall(group.world_size - 1, (value,))]


def _sum(outputs: list) -> int:
    return sum(outputs)


LAST_RANK_ONLY = register_dispatch_mode("LAST_RANK_ONLY", _last_rank_only, _sum)


class Toy(Worker):
    leaves_inputs_alone = True

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.log: list[str] = []
        self.register_mesh("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict:
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
        )
        return {
            "env": {name: os.environ[name] for name in names},
            "attributes": (self.role, self.pool_name, self.rank, self.world_size, self.local_rank),
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
        }

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self, value: int) -> int:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        total = torch.tensor(value + self.rank)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def sum_of(self, data: DataProto) -> int:
        return int(data.batch["x"].sum())

    @register(Dispatch.ALL_TO_ALL)
    def add(self, a: int, b: int) -> int:
        return a + b + self.offset

    @register(Dispatch.RANK_ZERO)
    def leader(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def only_first(self) -> int:
        return self.rank

    @register(LAST_RANK_ONLY)
    def on_last(self, value: int) -> int:
        return value * 10 + self.rank

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def shift(self, data: DataProto, by: int = 1, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        self.log.append("shift")
        tensors = {"x": data.batch["x"] + by, "rank": torch.full((len(data),), self.rank)}
        return DataProto.from_dict(tensors, dict(data.non_tensor_batch), data.meta_info)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, func, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": func(data.batch["x"])})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> tuple[int, int]:
        return len(data), data.meta_info["num_padding_rows"]

    @register(make_mesh_dispatch("pairs"))
    def by_pair(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(make_mesh_dispatch("missing"))
    def by_missing_mesh(self, data: DataProto) -> DataProto:
        return data

    @register(Dispatch.ONE_TO_ALL)
    def note(self, what: str) -> None:
        call_tag.get()["noted"] = what

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.log.append("sleep")

    @register(Dispatch.ONE_TO_ALL)
    def take_log(self) -> list[str]:
        log, self.log = self.log, []
        return log

    @register(Dispatch.DP_COMPUTE_PROTO)
    def write_in_place(self, data: DataProto) -> DataProto:
        data.batch["x"].add_(1)
        return data


@ray.remote
class RemoteToy(Toy):
    """Already a Ray class, as some users write theirs."""

    @register(Dispatch.ONE_TO_ALL)
    def kind(self) -> str:
        return "remote"


def cpu_pool(*devices: int, name: str, **options) -> RayResourcePool:
    return RayResourcePool(list(devices), use_gpu=False, name_prefix=name, **options)


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def ray_session():
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_the_example_of_the_documentation_runs(ray_session):
    page = (Path(__file__).parents[2] / "docs" / "single_controller.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("ray.init(num_cpus=3)\n", "")
    exec(compile(code, "docs/single_controller.md", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def three(ray_session):
    group = RayWorkerGroup(
        cpu_pool(3, name="pool_three", threads_per_worker=2), RayClassWithInitArgs(Toy, offset=100), "three"
    )
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def two(ray_session):
    group = RayWorkerGroup(cpu_pool(2, name="pool_two"), RayClassWithInitArgs(RemoteToy), "two")
    yield group
    group.shutdown()


def test_each_worker_knows_its_place(three):
    found = three.describe()
    for rank, worker in enumerate(found):
        env = worker["env"]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
        assert (env["OMP_NUM_THREADS"], worker["threads"]) == ("2", 2)
        assert worker["attributes"] == ("three", "pool_three", rank, 3, rank)
    assert len({(worker["env"]["MASTER_ADDR"], worker["env"]["MASTER_PORT"]) for worker in found}) == 1
    assert len({worker["pid"] for worker in found}) == 3


def test_gloo_rendezvous_from_the_environment(three):
    assert three.all_reduce(10) == [33, 33, 33]


def test_a_class_that_is_already_remote(two):
    assert two.kind() == ["remote", "remote"]
    assert max(worker["threads"] for worker in two.describe()) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_simple_dispatch_modes(three):
    assert three.sum_of(batch(4)) == [6, 6, 6]
    assert three.add([1, 2, 3], b=[10, 20, 30]) == [111, 122, 133]
    assert three.leader() == 0
    assert three.only_first() == 0
    assert three.on_last(7) == 72


def test_it_is_known_what_each_role_is_at(three, two):
    three.describe(), two.describe()
    drain_call_records()
    issued = [three.sleep(0.2), three.shift(batch(3)), two.sleep(0.2)]
    assert RayWorkerGroup.running_calls() == {"three": "sleep", "two": "sleep"}
    for future in issued:
        future.get()
    assert RayWorkerGroup.running_calls() == {}


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_data_parallel_over_any_number_of_rows(three, rows):
    result = three.shift(batch(rows), by=5).get()
    assert result.batch["x"].tolist() == [5 + i for i in range(rows)]
    assert result.non_tensor_batch["name"].tolist() == [f"row{i}" for i in range(rows)]
    assert result.meta_info == {"scale": 2}


def test_data_parallel_with_a_function_and_metrics(three):
    assert three.apply(lambda x: x * x, batch(4)).batch["y"].tolist() == [0, 1, 4, 9]
    assert three.count(batch(4)) == [(2, 0), (2, 1), (2, 1)]


def test_mesh_gives_a_pair_one_shard_and_one_answers(three):
    result = three.by_pair(batch(5))
    assert result.batch["x"].tolist() == list(range(5))
    assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2]
    with pytest.raises(WorkerError, match="mesh 'missing' was not registered"):
        three.by_missing_mesh(batch(5))


@pytest.mark.parametrize("rows", [1, 7])
def test_futures_feed_groups_of_other_sizes_without_the_driver(three, two, rows, monkeypatch):
    fetched = []
    fetch = CallWatch.fetch

    def counting_fetch(self, results, calls):
        fetched.extend(results)
        return fetch(self, results, calls)

    monkeypatch.setattr(CallWatch, "fetch", counting_fetch)
    first = three.shift(batch(rows), by=1)
    second = two.shift(first, by=10)
    third = three.shift(second, by=100)
    result = third.get()

    assert fetched == third.parts
    assert result.batch["x"].tolist() == [111 + i for i in range(rows)]
    assert result.non_tensor_batch["name"].tolist() == [f"row{i}" for i in range(rows)]


def test_futures_reach_every_kind_of_dispatch(three, two):
    future = two.shift(batch(6), by=0)
    assert three.sum_of(future) == [15, 15, 15]
    assert three.count(future) == [(2, 0)] * 3
    assert three.by_pair(future).batch["x"].tolist() == list(range(6))
    assert three.apply(torch.square, future).batch["y"].tolist() == [0, 1, 4, 9, 16, 25]
    assert two.shift(DataProtoFuture.concat(future.chunk(3)[1:]), by=0).get().batch["x"].tolist() == [2, 3, 4, 5]
    calls = []
    reversed_rows = future.then(lambda data: calls.append(len(data)) or data[::-1])
    assert two.shift(reversed_rows, by=1).get().batch["x"].tolist() == [6, 5, 4, 3, 2, 1]
    assert three.sum_of(DataProtoFuture.concat([reversed_rows, future])) == [30, 30, 30]
    assert calls == [6]


def test_an_empty_batch_is_an_error_also_when_it_is_a_future(three, two):
    with pytest.raises(ValueError, match="batch of 0 rows"):
        three.shift(batch(4)[:0])
    with pytest.raises(WorkerError, match="batch of 0 rows"):
        three.shift(ray_future_of(batch(4)[:0])).get()


def ray_future_of(data: DataProto) -> DataProtoFuture:
    return DataProtoFuture([ray.put(data)], only, ray.get)


def only(values: list) -> DataProto:
    return values[0]


def test_calls_on_one_pool_keep_their_order_and_pools_overlap(three, two):
    two.take_log()
    drain_call_records()
    slow = three.shift(batch(6), seconds=1.0)
    after = two.shift(slow)  # waits for its input, and the next call waits for it
    last = two.sleep(0.0)
    last.get()
    assert two.take_log() == [["shift", "sleep"]] * 2
    assert len(after.get()) == 6

    drain_call_records()
    futures = [three.sleep(1.0), two.sleep(1.0)]
    for future in futures:
        future.get()
    records = [record for record in drain_call_records() if record.method == "sleep"]
    assert len(records) == 5
    assert max(record.start for record in records) < min(record.end for record in records)


def test_records_say_who_ran_what_when_and_under_which_tag(three):
    drain_call_records()
    token = call_tag.set({"step": 3})
    try:
        three.sleep(0.2).get()
    finally:
        call_tag.reset(token)
    three.sleep(0.0).get()
    tagged, untagged = [], []
    for record in drain_call_records():
        (tagged if record.tag == {"step": 3} else untagged).append(record)
    pids = [worker["pid"] for worker in three.describe()]

    assert [(record.rank, record.pid) for record in sorted(tagged, key=lambda record: record.rank)] == list(
        enumerate(pids)
    )
    assert {record.tag.get("step") for record in untagged} == {None}
    for record in tagged:
        assert (record.pool, record.process_roles, record.role, record.method) == (
            "pool_three",
            "three",
            "three",
            "sleep",
        )
        assert 0.2 <= record.end - record.start < 5.0
        assert abs(record.end - time.time()) < 60.0


def test_what_a_method_adds_to_its_tag_stands_in_the_record(two):
    drain_call_records()
    two.note("first")
    two.note("second")
    two.describe()
    noted = [record.tag.get("noted") for record in drain_call_records()]
    assert sorted(noted, key=str) == [None, None, "first", "first", "second", "second"]


def test_the_driver_does_something_while_it_waits_and_an_error_of_that_ends_the_wait(three, two):
    done = []

    def do() -> None:
        done.append(time.monotonic())
        two.describe()  # waits itself

    with RayWorkerGroup.meanwhile(do):
        three.sleep(0.7).get()
    assert 2 <= len(done) <= 7
    three.sleep(0.3).get()
    assert len(done) <= 7, "not any more"

    def fail() -> None:
        raise LookupError("nothing there")

    with RayWorkerGroup.meanwhile(fail), pytest.raises(LookupError, match="nothing there"):
        three.sleep(0.3).get()
    three.sleep(0.0).get()


def test_inputs_that_a_worker_changes_are_noticed(three, monkeypatch):
    monkeypatch.setenv("PACELINE_CHECK_INPUTS", "1")
    assert three.shift(batch(6)).get().batch["x"].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(WorkerError, match=r"changed in place: 0\.x"):
        three.write_in_place(batch(6))


def test_colocated_roles_share_processes_and_keep_their_names(ray_session):
    combined = create_colocated_worker_cls(
        {"left": RayClassWithInitArgs(Toy, 1), "right": RayClassWithInitArgs(RemoteToy, offset=2)}
    )
    group = RayWorkerGroup(cpu_pool(1, name="shared"), combined)
    try:
        views = group.spawn({"left", "right"})
        left, right = views["left"], views["right"]
        assert left.describe()[0]["pid"] == right.describe()[0]["pid"]
        assert left.describe()[0]["attributes"] == ("left", "shared", 0, 1, 0)
        assert (left.add([0], [0]), right.add([0], [0])) == ([1], [2])
        assert right.kind() == ["remote"]
        assert not hasattr(left, "kind")
        assert not hasattr(group, "add")
        assert right.execute_all_sync("add", 0, 0) == [2]
        with pytest.raises(ValueError, match=r"call add on a group of `spawn`"):
            group.execute_all_sync("add", 0, 0)
        drain_call_records()
        right.sleep(0.0).get()
        (record,) = drain_call_records()
        assert (record.role, record.process_roles) == ("right", "left+right")
        with pytest.raises(WorkerError) as caught:
            right.by_missing_mesh(batch(1))
        assert (caught.value.role, caught.value.rank) == ("right", 0)
        with pytest.raises(ValueError, match=r"has the roles \['left', 'right'\]; spawn was asked for \['middle'\]"):
            group.spawn({"middle"})
        pid = left.describe()[0]["pid"]
    finally:
        group.shutdown()
    wait_until_gone([pid])
    with pytest.raises(WorkerError, match="were shut down"):
        left.describe()


def test_pools_split_merge_and_give_their_devices_back(ray_session, three, two):
    pool = cpu_pool(1, name="whole")
    with pytest.raises(ValueError, match=r"has 1 devices; sizes \[1, 1\]"):
        pool.split([1, 1])

    halves = RayResourcePool([2], use_gpu=False, name_prefix="pair", cpus_per_device=0.5).split([1, 1], ["a", "b"])
    groups = [RayWorkerGroup(half, RayClassWithInitArgs(Toy), half.name) for half in halves]
    pids = [group.describe()[0]["pid"] for group in groups]
    assert len(set(pids)) == 2
    assert [group.describe()[0]["attributes"][:3] for group in groups] == [("a", "a", 0), ("b", "b", 0)]

    merged = halves[1].merge(halves[0], name="both")
    with pytest.raises(ResourceError, match=r"in use by a, b"):
        RayWorkerGroup(merged, RayClassWithInitArgs(Toy), "late")
    groups[0].shutdown()
    assert groups[1].leader() == 0
    groups[1].shutdown()
    wait_until_gone(pids)

    group = RayWorkerGroup(merged, RayClassWithInitArgs(Toy), "late")
    found = group.describe()
    assert [worker["attributes"] for worker in found] == [("late", "both", 0, 2, 0), ("late", "both", 1, 2, 1)]
    group.shutdown()
    group.shutdown()
    wait_until_gone([worker["pid"] for worker in found])
    deadline = time.monotonic() + 10.0
    while ray.available_resources().get("CPU", 0.0) < 1.0:
        assert time.monotonic() < deadline, "the placement group was not removed"
        time.sleep(0.1)
