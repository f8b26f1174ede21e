"""torch's module of the simulated device, `torch.npu`: what `torch.cuda` is to CUDA.

It stands in one folder with its kernels and the metadata by which torch loads device backends when it is imported. So a
process has the device if that folder is on its PYTHONPATH, whatever it runs: the same way as with a real backend.
The name is that of Huawei's accelerators, whose torch backend is a PrivateUse1 too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import simulated_device_kernels as _kernels
import torch

NAME = "npu"
TOTAL_MEMORY = 8 << 30


def load() -> None:
    """Called by torch at the end of its import."""
    import torch.distributed as dist

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    if dist.is_available() and "SIMULATED" not in dist.Backend._plugins:
        dist.Backend.register_backend("simulated", _make_group, devices=[NAME])


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    return _kernels.group_on(dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, timeout))


# Devices


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing is lazy."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _kernels.device_count()


current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
synchronize = torch.accelerator.synchronize


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="simulated", total_memory=TOTAL_MEMORY)


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def device(index: Any) -> Any:
    """A block on another device."""
    return torch.accelerator.device_index(_index(index))


def _index(which: Any) -> int:
    if isinstance(which, int):
        return which if which >= 0 else current_device()
    index = torch.device(which if which is not None else NAME).index
    return current_device() if index is None else index


# Streams and events

Stream = functools.partial(torch.Stream, device=NAME)
Event = functools.partial(torch.Event, device=NAME)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


default_stream = current_stream


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


# Random numbers


def manual_seed(seed: int) -> None:
    _kernels.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _kernels.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _kernels.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _kernels.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


# Memory and precision

memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
empty_cache = torch.accelerator.empty_cache
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
