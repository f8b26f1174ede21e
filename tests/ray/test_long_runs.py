"""A long run takes what a short one takes: memory and descriptors of each of its processes stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import as_overrides, base_config, make_material, read_metrics

STEPS = 420
WARM_STEP = 120
"""By then caches are full, and old checkpoints are being removed."""
KEPT = ("WorkerShell", "TaskRunner", "RewardWorker", "main_ppo")
"""Parts of the command lines of the run's own processes."""


def taken(process: subprocess.Popen[bytes]) -> dict[int, tuple[str, float, int]]:
    """Of each process of the run its command line, resident MB and open descriptors."""
    found = {}
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        line = " ".join(one.cmdline())
        if any(name in line for name in KEPT):
            found[one.pid] = (line[:60], one.memory_info().rss / 2**20, one.num_fds())
    return found


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    while process.poll() is None:
        lines = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        if lines and lines[-1]["step"] >= step:
            return
        time.sleep(0.5)
    raise AssertionError((run_dir.parent / "output.txt").read_text()[-2000:])


@pytest.mark.slow
def test_memory_and_descriptors_do_not_grow(tmp_path: Path) -> None:
    material, run_dir = make_material(tmp_path / "material"), tmp_path / "run"
    settings = {
        "trainer__placement__name": "split",
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": STEPS,
        "trainer__total_epochs": STEPS,
        "trainer__save_freq": 20,
        "trainer__max_actor_ckpt_to_keep": 2,
        "trainer__max_critic_ckpt_to_keep": 2,
        "trainer__test_freq": 20,
        "trainer__live_view": False,
    }
    command = [sys.executable, "-m", "paceline.trainer.main_ppo"]
    command += as_overrides(base_config(material, run_dir, **settings))
    with (tmp_path / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for_step(process, run_dir, WARM_STEP)
        before = taken(process)
        wait_for_step(process, run_dir, STEPS - 5)
        after = taken(process)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert set(before) == set(after)
    assert len(before) >= 4
    for pid, (line, memory, descriptors) in before.items():
        assert after[pid][1] < 1.03 * memory + 8, (line, memory, after[pid][1])
        assert after[pid][2] <= descriptors + 4, (line, descriptors, after[pid][2])
