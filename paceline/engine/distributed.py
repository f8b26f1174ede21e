"""The process group that all roles of a worker process share, and what the engines need from it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def ensure_process_group(device: str, timeout_seconds: float | None = None) -> None:
    """Join the default group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless it was joined before.

    Without WORLD_SIZE the group has this process alone. On an accelerator the group has gloo too, for objects and
    tensors in main memory. `timeout_seconds` is how long a collective may take; None is PyTorch's own limit.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if device != "cpu":
        # Ray shows each worker its own device only; elsewhere the local rank counts over the devices of the node.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class AllRanks:
    """For engines whose model is held by all ranks of the default group together."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def _gather(self, value: T) -> list[T]:
        return gather_objects(value)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank passed, in the order of the ranks. Collective."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast(list[T], values)
