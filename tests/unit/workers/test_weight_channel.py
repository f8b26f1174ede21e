"""Weights by broadcast: bit for bit, in buckets, never more than two of them on either side."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline.workers.weight_channel import WeightChannel, packed, unpacked

Named = list[tuple[str, torch.Tensor]]


def some_weights() -> Named:
    dice = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=dice)),
        ("count", torch.tensor(3)),
        ("half", torch.randn(100, generator=dice).bfloat16()),
        ("nothing", torch.empty(0, 4)),
        ("large", torch.randn(40, 10, generator=dice).T),
        ("odd", torch.tensor([1, 2, 3], dtype=torch.uint8)),
        ("last", torch.tensor([float("nan"), -0.0])),
    ]


def together(size: int, *ends: Callable[[WeightChannel], Any]) -> list[Any]:
    """What each does with its end of a channel, rank 0 first. Threads do as processes would."""
    store = dist.HashStore()

    def act(rank: int) -> Any:
        return ends[min(rank, 1)](WeightChannel(store, rank, size, timeout_seconds=60))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(act, range(size)))


def test_what_is_received_is_what_was_sent_bit_for_bit_time_after_time() -> None:
    weights = some_weights()

    def send(channel: WeightChannel) -> None:
        channel.send(iter(weights), bucket_bytes=256)
        channel.send(iter(()), bucket_bytes=256)
        channel.send(iter(weights[:1]), bucket_bytes=256)

    def receive(channel: WeightChannel) -> list[Named]:
        return [list(channel.receive()) for _ in range(3)]

    for received in together(3, send, receive)[1:]:
        for sent, found in zip((weights, [], weights[:1]), received, strict=True):
            assert [name for name, _ in found] == [name for name, _ in sent]
            for (_, one), (_, other) in zip(sent, found, strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 64, 1000, 10_000])
def test_a_bucket_has_at_most_so_many_bytes_or_one_tensor(bucket_bytes: int) -> None:
    found: Named = []
    for contents, bucket in packed(some_weights(), bucket_bytes):
        assert len(bucket) <= bucket_bytes or len(contents) == 1
        found += unpacked(contents, lambda count, bucket=bucket: bucket[:count])
    assert [name for name, _ in found] == [name for name, _ in some_weights()]


class Memory(np.ndarray):
    """An array that can be watched."""


def test_neither_side_holds_more_than_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    size, empty = 4096, torch.empty
    alive: dict[str, set[int]] = defaultdict(set)
    most: dict[str, int] = defaultdict(int)

    def watched_empty(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") != torch.uint8 or shape[0] < size:
            return empty(*shape, **options)
        side, end = threading.current_thread().name, time.monotonic() + 1
        while len(alive[side]) > 1 and time.monotonic() < end:
            time.sleep(0.001)  # gloo's thread lets go of what it has carried a moment after that has arrived
        memory = np.zeros(shape, np.uint8).view(Memory)
        alive[side].add(id(memory))
        weakref.finalize(memory, alive[side].discard, id(memory))
        most[side] = max(most[side], len(alive[side]))
        return torch.from_numpy(memory)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            yield str(number), torch.full((size // 8,), float(number))

    monkeypatch.setattr(torch, "empty", watched_empty)
    together(2, lambda channel: channel.send(weights(), size), lambda channel: sum(1 for _ in channel.receive()))
    assert sorted(most.values()) == [2, 2]


def test_a_receiver_whose_sender_is_gone_has_an_error() -> None:
    def send(channel: WeightChannel) -> None:
        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(4)
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            channel.send(broken(), bucket_bytes=16)

    def receive(channel: WeightChannel) -> None:
        with pytest.raises(RuntimeError):
            list(channel.receive())

    together(2, send, receive)
