"""Cores and memory as containers limit them, by files as the kernel writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import machine

CORES = float(len(os.sched_getaffinity(0)))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Writes the files of control groups, and which of them this process is in."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")

    def write(membership: str, **files: str) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {}, CORES),
        ("0::/\n", {"cpu.max": "max 100000"}, CORES),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "6400000000 100000"}, CORES),
        # not in a namespace of its own: the limit may be that of the group itself, or of one around it
        ("0::/slurm/job1/step0\n", {"slurm/job1/cpu.max": "50000 100000"}, 0.5),
        ("0::/slurm/job1/step0\n", {"slurm/job2/cpu.max": "50000 100000"}, CORES),
        # v1: one hierarchy per set of controllers, limits in two files
        (
            "3:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "25000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            0.25,
        ),
        ("3:cpu,cpuacct:/docker/1\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ("4:memory:/\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, CORES),
    ],
)
def test_cores_are_those_of_the_quota(groups, membership, files, cores):
    groups(membership, **files)
    assert machine.available_cores() == cores
    assert machine.num_cores() == max(1, int(cores))


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"memory.max": "1000000"}),
        ("0::/a/b\n", {"a/memory.max": "1000000", "a/b/memory.max": "max"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "1000000"}),
    ],
)
def test_memory_is_that_of_the_container(groups, membership, files):
    groups("0::/\n")
    assert machine.total_memory() > 1000000
    groups(membership, **files)
    assert machine.total_memory() == 1000000


def test_affinity_counts():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_freed_memory_is_kept_unless_the_shell_has_its_own_wishes() -> None:
    """Seen in fresh processes: what is resident after 200 MB were freed."""
    program = """
import sys
from paceline.machine import keep_freed_memory

print(keep_freed_memory())
block = bytearray(200_000_000)
del block
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:")))
"""

    def resident_kb(**variables: str) -> tuple[str, int]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
        kept, kb = done.stdout.split()
        return kept, int(kb)

    kept, kb = resident_kb()
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert kb > 190_000
    assert resident_kb(MALLOC_ARENA_MAX="2") == ("False", pytest.approx(15_000, abs=50_000))
