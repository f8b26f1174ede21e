"""What the single controller costs, beside plain Ray actors that get the same calls.

With 2, 8 and 16 light workers: a call that carries nothing (`call`), and the ten calls of a PPO step, issued without
waiting, on a batch of 1 MB (`step`). With 4 workers: a batch of 256 MB, out in one shard per worker and back as one
batch (`transfer`), against shards of a numpy array by `ray.put`, concatenated when they come back. All take turns.

    python -m benchmarks.controller
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import ray
import torch

from benchmarks.table import report
from benchmarks.timing import take_turns
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

CALLS = 50
"""Of one measurement; printed is the time of one."""
CALLS_OF_A_STEP = 10


class Echo(Worker):
    leaves_inputs_alone = True  # as paceline's own workers

    @register(Dispatch.ONE_TO_ALL)
    def ping(self, number: int) -> int:
        return number

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def send_back(self, data: DataProto) -> DataProto:
        return data


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


def compare(title: str, ours: Callable[[], object], plain: Callable[[], object], repeats: int, *, per: int = 1) -> None:
    """Print milliseconds of both; `per` is how often a call repeats its work."""
    taken = take_turns({"paceline": ours, "plain Ray": plain}, repeats)
    milliseconds = {name: [1000 * value / per for value in seconds] for name, seconds in taken.items()}
    report(title, milliseconds, "ms", of="paceline")


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


def measure_calls(count: int, repeats: int) -> None:
    with workers(count) as (group, actors):
        compare(
            f"call, {count} workers",
            lambda: [group.ping(number) for number in range(CALLS)],
            lambda: [plain_ping(actors, number) for number in range(CALLS)],
            repeats,
            per=CALLS,
        )
        array = make_array(1)
        batch = DataProto.from_dict({"x": torch.from_numpy(array)})
        title = f"step of {CALLS_OF_A_STEP} calls, {count} workers"
        compare(title, partial(step, group, batch), partial(plain_step, actors, array), repeats)


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
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    for count in args.workers:
        measure_calls(count, args.repeats)
    measure_transfer(args.megabytes, args.repeats)


if __name__ == "__main__":
    main()
