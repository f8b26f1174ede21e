"""What the single controller costs, beside plain Ray actors that get the same calls.

With 2, 8 and 16 light workers: a call that carries nothing (`call`), and the ten calls of a PPO step, issued without
waiting, on a batch of 1 MB (`step`). With 4 workers: a batch of 256 MB, out in one shard per worker and back as one
batch (`transfer`), against shards of a numpy array by `ray.put`, concatenated when they come back. All take turns.

    python -m benchmarks.controller
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import ray
import torch

from benchmarks.timing import print_ratios
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

CALLS_OF_A_STEP = 10


class Echo(Worker):
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
        future.get()


def compare(title: str, ours: Callable[[], object], plain: Callable[[], object], repeats: int, *, per: int = 1) -> None:
    """Print milliseconds of both, taken in turns; `per` is how often the call repeats its work."""
    taken: dict[str, list[float]] = {"paceline": [], "plain Ray": []}
    ways = {"paceline": ours, "plain Ray": plain}
    for turn in range(repeats + 1):
        for name in ways if turn % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name]()
            if turn:
                taken[name].append(1000 * (time.perf_counter() - start) / per)
    print_ratios(title, taken, "ms", of="paceline")


def run(num_workers: int, megabytes: int, repeats: int) -> None:
    # A cluster of its own, also where another one runs; CPUs are only counted.
    ray.init("local", num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
    try:
        pool = RayResourcePool([num_workers], use_gpu=False, name_prefix="bench", threads_per_worker=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo), "echo")
        actors = [PlainEcho.remote() for _ in range(num_workers)]
        calls = 50
        compare(
            f"call, {num_workers} workers",
            lambda: [group.ping(number) for number in range(calls)],
            lambda: [plain_ping(actors, number) for number in range(calls)],
            repeats,
            per=calls,
        )
        array = np.random.default_rng(0).random((1024, megabytes * 256), dtype=np.float32)
        batch = DataProto.from_dict({"x": torch.from_numpy(array)})
        if megabytes == 1:
            compare(
                f"step of {CALLS_OF_A_STEP} calls, {num_workers} workers",
                partial(step, group, batch),
                partial(plain_step, actors, array),
                repeats,
            )
        else:
            compare(
                f"transfer of {megabytes} MB, {num_workers} workers",
                lambda: group.send_back(batch).get(),
                lambda: np.concatenate(ray.get(plain_send(actors, array))),
                repeats,
            )
        group.shutdown()
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    for num_workers in args.workers:
        run(num_workers, 1, args.repeats)
    run(4, args.megabytes, args.repeats)


if __name__ == "__main__":
    main()
