"""What this machine gives to this process: cores and memory, as its affinity and the limits of its container allow."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Which control groups this process is in."""


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees for what comes next; whether it does.

    Else glibc gives large tensors back at every step, and gets the next ones from the system page by page. A run's
    workers are told by MALLOC_ variables when they start; this is for commands that compute by themselves. What the
    shell says of malloc stays.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return False
    return bool(set_option(_M_MMAP_MAX, 0) and set_option(_M_TRIM_THRESHOLD, 2**31 - 1))


def available_cores() -> float:
    """The cores that this process may use; a container may be given a part of one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cores), *_cpu_quotas()])


def num_cores() -> int:
    """The same as a number of threads to start: at least 1."""
    return max(1, int(available_cores()))


def total_memory() -> int:
    """Bytes of main memory, of this machine or of a container that is given less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_memory_limits()])


def _cpu_quotas() -> Iterator[float]:
    """Cores by the quota of each control group: cgroup v2 has it in one file, v1 in two."""
    for folder in _groups("cpu"):
        words = _read(folder / "cpu.max").split() or [
            *_read(folder / "cpu.cfs_quota_us").split(),
            *_read(folder / "cpu.cfs_period_us").split(),
        ]
        # Without a limit v2 says "max", v1 -1.
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _memory_limits() -> Iterator[int]:
    for folder in _groups("memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            if (text := _read(folder / file).strip()).isdigit():
                yield int(text)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups that this process is in, from its own to the outermost: each may set a limit.

    In a container the path may be that of the host, which is not there; the outermost folder is then the container's.
    """
    for line in _read(MEMBERSHIP).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        inner = [part for part in path.split("/") if part not in ("", "..")]
        # v1 mounts a folder for each set of controllers, often with a link for each controller.
        for root in {CGROUPS / controllers, CGROUPS / controller} if controllers else {CGROUPS}:
            yield from (root.joinpath(*inner[:depth]) for depth in range(len(inner), -1, -1))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
