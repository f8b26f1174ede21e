"""However a run ends, no worker process is left behind, and the last words say why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline.report.status import read_status
from tests.runs import as_overrides, base_config, heed_ctrl_c, read_metrics

PATIENCE_SECONDS = 300
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(material: Path) -> Iterator[Start]:
    """Starts a run; one that did not end, though it should have, does so after the test."""
    started: list[subprocess.Popen] = []

    def start(run_dir: Path, **changes: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "paceline.trainer.main_ppo"]
        command += as_overrides(base_config(material, run_dir, **changes))
        with (run_dir.parent / "output.txt").open("w") as output:
            started.append(
                subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=heed_ctrl_c
                )
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    deadline = time.time() + PATIENCE_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while time.time() < deadline:
        if metrics.exists() and f'"step": {step}' in metrics.read_text():
            return
        assert process.poll() is None, (run_dir.parent / "output.txt").read_text()
        time.sleep(0.2)
    raise TimeoutError((run_dir.parent / "output.txt").read_text())


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_first(process: subprocess.Popen, name: str) -> list[psutil.Process]:
    """Kill a descendant of this name as soon as it is there; gives all that were there."""
    deadline = time.time() + PATIENCE_SECONDS
    children: list[psutil.Process] = []
    while name not in [child.name() for child in children] and time.time() < deadline:
        children = descendants(process)
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)
    next(child for child in children if child.name() == name).kill()
    return children


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupted_run_leaves_no_process_behind(start: Start, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the whole process group."""
    process = start(tmp_path / "run", trainer__total_training_steps=100000)
    wait_for_step(process, tmp_path / "run", step=1)
    children = descendants(process)
    assert any("ray::" in " ".join(child.cmdline()) for child in children)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert_gone(children)
    assert "stopped by Ctrl-C" in (tmp_path / "output.txt").read_text()
    assert (read_status(tmp_path / "run") or {}).get("state") == "stopped"


@pytest.mark.slow
def test_a_terminated_run_saves_its_last_step_if_asked_to(start: Start, tmp_path: Path) -> None:
    """A scheduler's SIGTERM, which reaches the launching process alone."""
    run_dir = tmp_path / "run"
    process = start(run_dir, trainer__total_training_steps=100000, trainer__save_on_interrupt=True)
    wait_for_step(process, run_dir, step=1)
    children = descendants(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert_gone(children)
    output = (tmp_path / "output.txt").read_text()
    assert "ending after this step, with a checkpoint" in output
    assert "stopped by SIGTERM" in output
    last = read_metrics(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / f"global_step_{last}" / "trainer.json").exists()


@pytest.mark.slow
def test_a_failing_run_says_which_role_failed_and_leaves_no_process_behind(start: Start, tmp_path: Path) -> None:
    """A learning rate that breaks the weights in the first optimizer step."""
    process = start(
        tmp_path / "run",
        trainer__total_training_steps=100000,
        actor_rollout_ref__actor__optim__lr=1e20,
    )
    wait_for_step(process, tmp_path / "run", step=0)
    children = descendants(process)
    assert process.wait(timeout=60) == 1
    assert_gone(children)
    last_words = (tmp_path / "output.txt").read_text()
    assert "actor_rollout rank 0 failed in" in last_words
    assert "NonFiniteError: optimizer step 1" in last_words


@pytest.mark.slow
def test_a_run_whose_ray_dies_says_so_at_once_and_ends(start: Start, tmp_path: Path) -> None:
    """Left alone, Ray is silent for a minute and then ends the launching process."""
    process = start(tmp_path / "run", trainer__total_training_steps=100000)
    wait_for_step(process, tmp_path / "run", step=1)
    children = descendants(process)
    next(child for child in children if child.name() == "gcs_server").kill()
    assert process.wait(timeout=60) == 1
    assert_gone(children)
    output = (tmp_path / "output.txt").read_text()
    assert re.search(r"Ray's own process gcs_server \(pid \d+\) ended with code -9", output)
    assert "the same command starts from the beginning" in output
    assert "Traceback" not in output
    assert (read_status(tmp_path / "run") or {}).get("state") == "failed"


@pytest.mark.slow
def test_a_run_that_lost_rays_records_goes_on_for_longer_than_ray_waits_for_them(start: Start, tmp_path: Path) -> None:
    """After a minute without them Ray ends every process that it was started in, whatever was started there since."""
    restarts = {"trainer__max_restarts": 1, "trainer__save_freq": 500, "trainer__max_actor_ckpt_to_keep": 1}
    process = start(tmp_path / "run", trainer__total_training_steps=100000, **restarts)
    wait_for_step(process, tmp_path / "run", step=1)
    next(child for child in descendants(process) if child.name() == "gcs_server").kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=100)
    children = descendants(process)
    before = read_metrics(tmp_path / "run")[-1]["step"]
    wait_for_step(process, tmp_path / "run", step=before + 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert_gone(children)
    assert "starting again from the beginning; 0 more restarts" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_that_is_killed_at_its_start_is_told_in_a_line(start: Start, tmp_path: Path, name: str) -> None:
    process = start(tmp_path / "run")
    children = kill_first(process, name)
    assert process.wait(timeout=PATIENCE_SECONDS) == 1
    assert_gone(children)
    output = (tmp_path / "output.txt").read_text()
    assert "Ray did not start" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_that_is_killed_at_its_start_is_started_again_where_restarts_are_left(
    start: Start, tmp_path: Path, name: str
) -> None:
    process = start(tmp_path / "run", trainer__max_restarts=1, trainer__save_freq=1, trainer__total_training_steps=1)
    kill_first(process, name)
    assert process.wait(timeout=PATIENCE_SECONDS) == 0, (tmp_path / "output.txt").read_text()
    output = (tmp_path / "output.txt").read_text()
    assert output.count("Ray did not start") == 1
    assert "Traceback" not in output
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1
