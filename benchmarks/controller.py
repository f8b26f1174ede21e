"""What the single controller costs: calls per second, and the transfer of a large batch against plain numpy on Ray.

    python -m benchmarks.controller [--repeats 20] [--calls 1000] [--megabytes 256]

Four light workers. The batch goes out in one shard per worker and comes back as one batch; the baseline sends the same
shards of a numpy array with `ray.put` to plain Ray actors and concatenates what they return. The two take turns, also
at being first. `ratio_of_medians` compares the median times, `median_of_ratios` goes turn by turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import ray
import torch

from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

NUM_WORKERS = 4
RATIO_GOAL = 1.2


class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ping(self, number: int) -> int:
        return number

    @register(Dispatch.DP_COMPUTE_PROTO)
    def send_back(self, data: DataProto) -> DataProto:
        return data


@ray.remote(num_cpus=0)
class PlainEcho:
    def send_back(self, array: np.ndarray) -> np.ndarray:
        return array


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_calls(group: RayWorkerGroup, num_calls: int) -> dict[str, float]:
    for number in range(20):
        group.ping(number)
    elapsed = seconds(lambda: [group.ping(number) for number in range(num_calls)])
    return {"calls_per_second": num_calls / elapsed, "ms_per_call": 1000 * elapsed / num_calls}


def measure_transfer(group: RayWorkerGroup, megabytes: int, repeats: int) -> dict[str, float]:
    rows = 1024
    array = np.random.default_rng(0).random((rows, megabytes * 2**20 // (4 * rows)), dtype=np.float32)
    batch = DataProto.from_dict({"x": torch.from_numpy(array)})
    plain = [PlainEcho.remote() for _ in range(NUM_WORKERS)]

    def ours() -> DataProto:
        return group.send_back(batch)

    def baseline() -> np.ndarray:
        shards = np.split(array, NUM_WORKERS)
        refs = [actor.send_back.remote(ray.put(shard)) for actor, shard in zip(plain, shards, strict=True)]
        return np.concatenate(ray.get(refs))

    assert torch.equal(ours().batch["x"], torch.from_numpy(baseline()))  # also warms both up
    pairs = []
    for turn in range(repeats):
        first, second = (ours, baseline) if turn % 2 else (baseline, ours)
        times = {first: seconds(first), second: seconds(second)}
        pairs.append((times[ours], times[baseline]))
    ours_seconds, baseline_seconds = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "dataproto_seconds": ours_seconds,
        "numpy_seconds": baseline_seconds,
        "ratio_of_medians": ours_seconds / baseline_seconds,
        "median_of_ratios": statistics.median(mine / theirs for mine, theirs in pairs),
        "ratio_goal": RATIO_GOAL,
    }


def run(num_calls: int, megabytes: int, repeats: int) -> dict[str, float]:
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        pool = RayResourcePool([NUM_WORKERS], use_gpu=False, name_prefix="bench", threads_per_worker=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo), "echo")
        result = measure_calls(group, num_calls) | measure_transfer(group, megabytes, repeats)
        group.shutdown()
        return result
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    result = run(options.calls, options.megabytes, options.repeats)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
