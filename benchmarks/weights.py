"""What new weights cost on their way to a rollout in other processes: by broadcast, and through Ray's object store.

A sender and as many receivers as are asked for, without gathering before and loading behind it: a bare broadcast of the
same bytes in pieces of a bucket, the channel of `weight_transfer=broadcast`, and the buckets of `object_store`. Printed
are seconds per GB, and by how much the memory of sender and receiver is larger at its peak than before, per GB. The
goal of the channel is at most 1.3 of the bare broadcast's time.

    python -m benchmarks.weights
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from paceline.workers.weight_calls import BUCKET_BYTES, in_buckets
from paceline.workers.weight_channel import MeetingPoint, WeightChannel

TENSOR = (2048, 2048)
"""Of float32: 16 MiB, as a layer of a model of some billion parameters has."""
GOAL = 1.3


class End(Worker):
    """A sender or a receiver."""

    leaves_inputs_alone = True

    def __init__(self, num_tensors: int) -> None:
        self.weights = [(str(number), torch.full(TENSOR, float(number))) for number in range(num_tensors)]
        self.buckets = iter(in_buckets(()))
        self.before = 0

    @register(Dispatch.ONE_TO_ALL)
    def open(self) -> MeetingPoint:
        self.store, point = WeightChannel.open("127.0.0.1")
        return point

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def join(self, point: MeetingPoint, size: int, *, sends: bool) -> None:
        self.place = 0 if sends else self.rank + 1
        store = self.store if sends else TCPStore(point.host, point.port, is_master=False)
        self.channel = WeightChannel(store, self.place, size)
        self.bare = dist.ProcessGroupGloo(PrefixStore("bare", store), self.place, size)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def broadcast_bare(self, num_bytes: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        piece = torch.empty(min(BUCKET_BYTES, num_bytes), dtype=torch.uint8)
        for start in range(0, num_bytes, BUCKET_BYTES):
            self.bare.broadcast([piece[: num_bytes - start]], options).wait()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def send(self) -> None:
        self.channel.send(iter(self.weights), BUCKET_BYTES)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def receive(self) -> list[float]:
        return [float(tensor[0, 0]) for _, tensor in self.channel.receive()]

    @register(Dispatch.ONE_TO_ALL_FIRST_ANSWERS, blocking=False)
    def put(self, bucket: int) -> DataProto:
        if bucket == 0:
            self.buckets = in_buckets(self.weights)
        return DataProto(meta_info={"weights": next(self.buckets)})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def get(self, *buckets: DataProto) -> list[float]:
        return [float(tensor[0, 0]) for bucket in buckets for tensor in bucket.meta_info["weights"].values()]

    @register(Dispatch.ONE_TO_ALL)
    def forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = psutil.Process().memory_info().rss

    @register(Dispatch.ONE_TO_ALL)
    def peak(self) -> int:
        """Bytes beyond those of `forget_peak`, those of Ray's shared memory that this process has touched included."""
        lines = Path("/proc/self/status").read_text().splitlines()
        [highest] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        return highest - self.before


@contextmanager
def ends(num_receivers: int, num_tensors: int) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """The sender and the receivers, on a Ray of their own; CPUs are only counted."""
    num_bytes = num_tensors * 4 * TENSOR[0] * TENSOR[1]
    store = {"object_store_memory": max(2**30, int(2.5 * num_bytes))}
    ray.init("local", num_cpus=num_receivers + 1, include_dashboard=False, log_to_driver=False, **store)
    try:
        sender, receivers = (
            RayWorkerGroup(
                RayResourcePool([count], use_gpu=False, name_prefix=name, threads_per_worker=1),
                RayClassWithInitArgs(End, held),
                name,
            )
            for name, count, held in (("sender", 1, num_tensors), ("receivers", num_receivers, 0))
        )
        [point] = sender.open()
        joining = [group.join(point, num_receivers + 1, sends=group is sender) for group in (sender, receivers)]
        for future in joining:
            future.get()
        yield sender, receivers
    finally:
        ray.shutdown()


def measure(num_receivers: int, num_tensors: int, repeats: int) -> None:
    num_bytes = num_tensors * 4 * TENSOR[0] * TENSOR[1]
    expected = [float(number) for number in range(num_tensors)]
    with ends(num_receivers, num_tensors) as (sender, receivers):
        num_buckets = sum(
            1 for _ in in_buckets((str(number), torch.empty(TENSOR, device="meta")) for number in expected)
        )

        def bare() -> None:
            futures = [group.broadcast_bare(num_bytes) for group in (sender, receivers)]
            for future in futures:
                future.get()

        def channel() -> None:
            sender.send()
            assert receivers.receive().get() == [expected] * num_receivers

        def object_store() -> None:
            buckets = [sender.put(bucket) for bucket in range(num_buckets)]
            assert receivers.get(*buckets).get() == [expected] * num_receivers

        ways = {"channel": channel, "bare broadcast": bare, "object store": object_store}
        taken = take_turns(ways, repeats)
        per_gb = {name: [value / num_bytes * 1e9 for value in seconds] for name, seconds in taken.items()}
        title = f"weights to {num_receivers} receiver{'s' if num_receivers > 1 else ''}"
        report(f"{title}, 1 GB", per_gb, "s", of="channel")
        peaks: dict[str, dict[str, float]] = {"sender": {}, "receiver": {}}
        for name, way in ways.items():
            for group in (sender, receivers):
                group.forget_peak()
            way()
            peaks["sender"][name] = sender.peak()[0] / num_bytes
            peaks["receiver"][name] = max(receivers.peak()) / num_bytes
    for side, found in peaks.items():
        values = {name: [value] for name, value in found.items()}
        report(f"{title}, peak memory of a {side}, of {num_bytes / 1e9:.1f} GB", values, "GB / GB", of=None)
    ratio = sorted(per_gb["channel"])[repeats // 2] / sorted(per_gb["bare broadcast"])[repeats // 2]
    remark(f"To {num_receivers}: the channel took {ratio:.2f} of a bare broadcast's time; the goal is {GOAL}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for count in args.receivers:
        measure(count, max(1, args.megabytes // 16), args.repeats)


if __name__ == "__main__":
    main()
