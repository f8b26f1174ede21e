"""What the processes of a run take on this machine: shares of a core, memory, and that of GPUs if there are any."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections import Counter

import psutil

from paceline.report.json_lines import Row

OUR_NAMES = ("python", "ray")
"""Parts of the names of a run's processes."""
LOOKS_A_SAMPLE = 4
"""So many looks lie between two samples of what processes take."""
GPU_SECONDS = 10.0
"""Between two questions to the driver of the GPUs: each is a process of its own."""
ASK_GPUS = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")

Taken = tuple[str, int, float, int, int | None]
"""Name, id, share of a core since the last time, resident MB, MB of GPUs."""


class ProcessWatch:
    """Of one run."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._looks = 0
        self._last: list[Taken] = []
        self._gpus = GpuMemory()

    def look(self, status: Row) -> list[Taken]:
        """Asked for every few looks; the ids of a run that has ended may be others' by now."""
        self._looks += 1
        if status.get("state") != "running" or status.get("host") != socket.gethostname():
            self._last = []
        elif not self._last or self._looks % LOOKS_A_SAMPLE == 0:
            self._last = self._now(status.get("processes", {}))
        return self._last

    def _now(self, by_name: Row) -> list[Taken]:
        found: list[Taken] = []
        on_gpus = self._gpus.by_process()
        for name, pid in by_name.items():
            try:
                process = self._known.setdefault(pid, psutil.Process(pid))
                if not any(word in process.name() for word in OUR_NAMES):  # an id of another node's
                    continue
                with process.oneshot():
                    cores, memory = process.cpu_percent() / 100, process.memory_info().rss >> 20
                found.append((name, pid, round(cores, 1), memory, on_gpus.get(pid)))
            except psutil.Error:
                self._known.pop(pid, None)
        return found


class GpuMemory:
    """Memory that processes have on NVIDIA's GPUs. Nobody waits for an answer: the next one to ask gets it."""

    def __init__(self) -> None:
        self._asking: subprocess.Popen[str] | None = None
        self._next = 0.0 if shutil.which(ASK_GPUS[0]) else float("inf")
        self._found: dict[int, int] = {}

    def by_process(self) -> dict[int, int]:
        """MB by process id, as of some seconds ago."""
        if self._asking is not None and self._asking.poll() is not None:
            self._found = megabytes_by_process(self._asking.communicate()[0])
            self._asking = None
        if self._asking is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + GPU_SECONDS
            self._asking = subprocess.Popen(ASK_GPUS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self._found


def megabytes_by_process(answer: str) -> dict[int, int]:
    """A process may be on several GPUs.

    >>> megabytes_by_process("4711, 1024\\n4711, 512\\n4715, [N/A]\\n")
    {4711: 1536}
    """
    total: Counter[int] = Counter()
    for line in answer.splitlines():
        pid, _, size = (part.strip() for part in line.partition(","))
        if pid.isdecimal() and size.isdecimal():
            total[int(pid)] += int(size)
    return dict(total)
