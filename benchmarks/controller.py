"""What the single controller costs, beside plain Ray actors that get the same calls.

With 2, 8, 16 and 64 light workers: a call that carries nothing (`call`), and the ten calls of a PPO step, issued
without waiting, on a batch of 1 MB (`step`); and the processor time that the driver's own process takes for both, with
its slope: what a worker more costs. With 4 workers: a batch of 256 MB, out in one shard per worker and back as one
batch (`transfer`), against shards of a numpy array by `ray.put`, concatenated when they come back. All take turns.

    python -m benchmarks.controller
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import ray
import torch

from benchmarks.echo import Echo
from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from paceline.protocol import DataProto
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

CALLS = 50
"""Of one measurement; printed is the time of one."""
CALLS_OF_A_STEP = 10


@ray.remote(num_cpus=0)
class PlainEcho:
    def ping(self, number: int) -> int:
        return number

    def send_back(self, array: np.ndarray) -> np.ndarray:
        return array


def plain_ping(actors: list, number: int) -> list[int]:
    return ray.get([actor.ping.remote(number) for actor in actors])


def plain_send(actors: list, array: np.ndarray) -> list:
    shards = np.array_split(array, len(actors))
    return [actor.send_back.remote(ray.put(shard)) for actor, shard in zip(actors, shards, strict=True)]


def plain_step(actors: list, array: np.ndarray) -> None:
    for sent in [plain_send(actors, array) for _ in range(CALLS_OF_A_STEP)]:
        np.concatenate(ray.get(sent))


def step(group: RayWorkerGroup, batch: DataProto) -> None:
    for future in [group.send_back(batch) for _ in range(CALLS_OF_A_STEP)]:
        future.get().fetched()


def compare(
    title: str, ours: Callable[[], object], plain: Callable[[], object], repeats: int, *, per: int = 1
) -> dict[str, list[float]]:
    """Print milliseconds of both; `per` is how often a call repeats its work. Gives those of this process's processor
    time."""
    own: dict[str, list[float]] = defaultdict(list)

    def noted(name: str, way: Callable[[], object]) -> None:
        began = time.process_time()
        way()
        own[name].append(time.process_time() - began)

    ways = {"paceline": ours, "plain Ray": plain}
    taken = take_turns({name: partial(noted, name, way) for name, way in ways.items()}, repeats)

    def milliseconds(measured: Mapping[str, list[float]]) -> dict[str, list[float]]:
        return {name: [1000 * value / per for value in seconds] for name, seconds in measured.items()}

    report(title, milliseconds(taken), "ms", of="paceline")
    return milliseconds({name: seconds[1:] for name, seconds in own.items()})  # the first is for warming up


def report_driver(work: str, own: Mapping[int, Mapping[str, list[float]]]) -> None:
    """Print the driver's own time by number of workers, and what a worker more costs it."""
    for count, measured in own.items():
        report(f"{work}, {count} workers: the driver's own", measured, "ms of CPU", of="paceline")
    if len(own) > 1:
        medians = {name: [statistics.median(measured[name]) for measured in own.values()] for name in measured}
        slopes = {name: statistics.linear_regression([*own], values).slope for name, values in medians.items()}
        said = ", ".join(f"{1000 * slope:.0f} µs ({name})" for name, slope in slopes.items())
        remark(f"{work}: a worker more costs the driver's process {said} of processor time.")


@contextmanager
def workers(count: int) -> Iterator[tuple[RayWorkerGroup, list]]:
    """A worker group, and as many plain actors, on a Ray of their own; CPUs are only counted."""
    ray.init("local", num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        pool = RayResourcePool([count], use_gpu=False, name_prefix="bench", threads_per_worker=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo), "echo")
        yield group, [PlainEcho.remote() for _ in range(count)]
        group.shutdown()
    finally:
        ray.shutdown()


def make_array(megabytes: int) -> np.ndarray:
    return np.random.default_rng(0).random((1024, megabytes * 256), dtype=np.float32)


def measure_calls(count: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Gives the driver's own time, of a call and of a step."""
    with workers(count) as (group, actors):
        of_call = compare(
            f"call, {count} workers",
            lambda: [group.ping(number) for number in range(CALLS)],
            lambda: [plain_ping(actors, number) for number in range(CALLS)],
            repeats,
            per=CALLS,
        )
        array = make_array(1)
        batch = DataProto.from_dict({"x": torch.from_numpy(array)})
        title = f"step of {CALLS_OF_A_STEP} calls, {count} workers"
        of_step = compare(title, partial(step, group, batch), partial(plain_step, actors, array), repeats)
        return of_call, of_step


def measure_transfer(megabytes: int, repeats: int) -> None:
    with workers(4) as (group, actors):
        array = make_array(megabytes)
        batch = DataProto.from_dict({"x": torch.from_numpy(array)})

        def ours() -> DataProto:
            return group.send_back(batch).get().fetched()

        def plain() -> np.ndarray:
            return np.concatenate(ray.get(plain_send(actors, array)))

        assert torch.equal(ours().batch["x"], torch.from_numpy(plain()))
        compare(f"transfer of {megabytes} MB, 4 workers", ours, plain, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16, 64])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    own = {count: measure_calls(count, args.repeats) for count in args.workers}
    report_driver("call", {count: of_call for count, (of_call, _) in own.items()})
    report_driver(f"step of {CALLS_OF_A_STEP} calls", {count: of_step for count, (_, of_step) in own.items()})
    measure_transfer(args.megabytes, args.repeats)


if __name__ == "__main__":
    main()
