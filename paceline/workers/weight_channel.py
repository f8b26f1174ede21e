"""Weights from one process to several by broadcast, in a process group of their own.

The sender is rank 0 of the group. The processes may have default groups of their own, so the group is none that
torch.distributed knows: it meets in a TCPStore of the sender's. Tensors travel in buckets, each one flat tensor behind
a line that says what is in it, so that nobody has to know before what will come. The sender fills a bucket while
another is under way, and a receiver takes the next when its reader is done with one: neither holds more than two.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

ALIGNMENT = 16
"""Bytes. A tensor begins at a multiple of it, so that it can be read in place whatever its dtype."""
MEETING_SECONDS = 300.0
"""How long the processes of a channel may take to meet."""
TensorPlace = tuple[str, str, list[int], int]
"""What lies in a bucket, and where: name, dtype, shape, first byte."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the processes of a channel meet: a store in the sender.

    MeetingPoint(host="10.0.0.5", port=40123, sender="node-5/4711")
    """

    host: str
    port: int
    sender: str
    """The sender's process."""


def this_process() -> str:
    """A name that no other process of a cluster has."""
    return f"{socket.gethostname()}/{os.getpid()}"


class WeightChannel:
    """One process's end of a channel. All of its processes make it, and then send and receive, in one order."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: str = "cpu", timeout_seconds: float | None = None
    ) -> None:
        self._store = store  # the sender's is the server that the others are connected to
        self._device, self._group = _make_group(store, rank, size, device, timeout_seconds)

    @staticmethod
    def open(host: str) -> tuple[dist.Store, MeetingPoint]:
        """The sender's store, at a free port of its node. `host` is the node's address."""
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEETING_SECONDS))
        return store, MeetingPoint(host, store.port, this_process())

    @classmethod
    def join(cls, point: MeetingPoint, rank: int, size: int, device: str, timeout_seconds: float | None) -> Self:
        """A receiver's end."""
        store = TCPStore(point.host, point.port, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))
        return cls(store, rank, size, device, timeout_seconds)

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> None:
        """Send all tensors, by rank 0. A bucket has at most so many bytes, or one tensor that has more."""
        under_way: dist.Work | None = None
        for contents, bucket in packed(named_tensors, bucket_bytes, self._device):
            self.send_line(json.dumps(contents).encode())
            work = self._broadcast(bucket)
            if under_way is not None:
                under_way.wait()
            under_way = work
        if under_way is not None:
            under_way.wait()
        self.send_line(b"")

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 sends, in its order. A tensor that is kept keeps its bucket."""
        while line := self.receive_line():
            yield from unpacked(json.loads(line), self._receive_bytes)

    def send_line(self, line: bytes) -> None:
        """Send one line, by rank 0; not an empty one, which ends what `send` sends."""
        self._send_number(len(line))
        if line:
            self._broadcast(torch.frombuffer(bytearray(line), dtype=torch.uint8).to(self._device)).wait()

    def receive_line(self) -> bytes:
        """The line that rank 0 sends now."""
        length = self._receive_number()
        return self._receive_bytes(length).cpu().numpy().tobytes() if length else b""

    def any_process(self, found: bool) -> bool:
        """Whether any process of the channel found something. All of them ask."""
        number = torch.tensor([int(found)], device=self._device)
        self._group.allreduce([number], dist.ReduceOp.MAX).wait()
        return bool(number)

    def _send_number(self, number: int) -> None:
        self._broadcast(torch.tensor([number], device=self._device)).wait()

    def _receive_number(self) -> int:
        number = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(number).wait()
        return int(number)

    def _receive_bytes(self, count: int) -> Tensor:
        received = torch.empty(count, dtype=torch.uint8, device=self._device)
        self._broadcast(received).wait()
        return received

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        # torch.distributed.broadcast takes groups alone that were made from the default one.
        work: dist.Work = self._group.broadcast([tensor], options)
        return work


def packed(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: str = "cpu"
) -> Iterator[tuple[list[TensorPlace], Tensor]]:
    """Copies of the tensors in buckets, each with what is in them.

    Two buckets take turns: the memory of one is written to again when the one after it was taken.

    >>> [contents for contents, _ in packed([("a", torch.zeros(2)), ("b", torch.zeros(3, 1))], bucket_bytes=64)]
    [[('a', 'float32', [2], 0), ('b', 'float32', [3, 1], 16)]]
    """
    contents: list[TensorPlace] = []
    bucket, other = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
    end = 0
    for name, tensor in named_tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if contents and start + tensor.nbytes > bucket_bytes:
            yield contents, bucket[:end]
            contents, bucket, other = [], other, bucket
        if not contents:
            start = 0
            if len(bucket) < max(bucket_bytes, tensor.nbytes):
                del bucket
                bucket = torch.empty(max(bucket_bytes, tensor.nbytes), dtype=torch.uint8, device=device)
        end = start + tensor.nbytes
        _read(bucket, start, tensor.dtype, tensor.shape).copy_(tensor)
        contents.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
    if contents:
        yield contents, bucket[:end]


def unpacked(contents: list[TensorPlace], read_bytes: Callable[[int], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, in its memory. `read_bytes(count)` gives the bucket."""
    _, dtype, shape, start = contents[-1]
    bucket = read_bytes(start + torch.Size(shape).numel() * getattr(torch, dtype).itemsize)
    for name, dtype, shape, start in contents:
        yield name, _read(bucket, start, getattr(torch, dtype), shape)


def _read(bucket: Tensor, start: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """A tensor in a bucket."""
    size = torch.Size(shape)
    return bucket[start : start + size.numel() * dtype.itemsize].view(dtype).view(size)


def _make_group(store: dist.Store, rank: int, size: int, device: str, timeout_seconds: float | None) -> tuple[str, Any]:
    """Where buckets lie, and the group that carries them: nccl between CUDA devices, else gloo in main memory."""
    store = PrefixStore("weights", store)
    if device == "cuda":
        return device, dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds is not None else dist.default_pg_timeout
    return "cpu", dist.ProcessGroupGloo(store, rank, size, timeout)
