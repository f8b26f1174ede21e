"""What processes take, GPUs included where a machine has any."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from paceline.report.page import processes
from paceline.report.page.processes import GpuMemory, ProcessWatch

HERE = {"state": "running", "host": socket.gethostname(), "processes": {"driver": os.getpid(), "gone": 2**22 + 1}}


def test_processes_of_this_machine_are_shown_while_the_run_goes_on() -> None:
    watch = ProcessWatch()
    [(name, pid, _, memory, on_gpus)] = watch.look(HERE)
    assert (name, pid, on_gpus) == ("driver", os.getpid(), None)
    assert memory > 10
    assert watch.look({**HERE, "host": "another"}) == watch.look({**HERE, "state": "finished"}) == []


def test_memory_on_gpus_is_asked_for_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program that comes with the driver; here is a script in its place."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{os.getpid()}, 2048'\necho '1, 512'\n")
    program.chmod(0o755)
    monkeypatch.setattr(processes, "ASK_GPUS", (str(program), *processes.ASK_GPUS[1:]))
    monkeypatch.setattr(processes, "LOOKS_A_SAMPLE", 1)
    watch = ProcessWatch()
    assert watch.look(HERE)[0][-1] is None
    deadline = time.monotonic() + 30
    while watch.look(HERE)[0][-1] != 2048:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_gpus_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ASK_GPUS", ("no-such-program",))
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert GpuMemory().by_process() == {}
