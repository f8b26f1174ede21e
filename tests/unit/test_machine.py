"""Cores and memory as containers limit them, by files as the kernel writes them."""

from __future__ import annotations

import os
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
