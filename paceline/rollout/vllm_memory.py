"""The shared memory of vLLM's ranks on a CPU: under a name of this run alone, and removed after a run that was killed.

vLLM names it alike in every run, so that two runs on a machine would write into each other's, and what a killed one
left would keep the next from starting. Whether an owner is alive is told by a lock on a file beside the memory, not by
process ids: containers may share /dev/shm and see none of each other's processes.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from paceline.private_apis.vllm_private import shared_memory_named

FOLDER = Path("/dev/shm")
PREFIX = "paceline-vllm-"
_held: list[int] = []
"""Descriptors of the locks of this process; the kernel lets go of them when it ends, however that happens."""


@contextmanager
def shared_memory_of_this_run(folder: Path = FOLDER) -> Iterator[None]:
    """An engine that is made inside has memory under a name of its own. All ranks must enter it."""
    remove_left_memory(folder)
    names = [f"{PREFIX}{uuid.uuid4().hex}"]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    hold(names[0], folder)
    with shared_memory_named(names[0]):
        yield


def hold(name: str, folder: Path = FOLDER) -> int:
    """Lock the name for as long as this process lives, together with other ranks."""
    path = folder / f"{name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(OSError):  # between the two lines someone may have taken it for left
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _held.append(descriptor)
                return descriptor
        os.close(descriptor)


def remove_left_memory(folder: Path = FOLDER) -> None:
    """Remove memory whose owners have all ended. Memory without a lock is not ours, and stays."""
    for lock in folder.glob(f"{PREFIX}*.lock"):
        with suppress(OSError):  # held by someone who lives, someone else's, or another rank was faster
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for file in folder.glob(f"{lock.stem}*"):
                    if file != lock:
                        file.unlink(missing_ok=True)
                lock.unlink()
            finally:
                os.close(descriptor)
