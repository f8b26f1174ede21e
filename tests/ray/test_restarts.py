"""Processes of a run die, and it goes on by itself as if they had not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.faults import FAULTS, POINTS, FaultyRunner
from tests.runs import as_omegaconf, base_config, make_material, results

SPLIT = {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2}


@pytest.fixture
def faults(tmp_path: Path):
    """A Ray whose processes know where deaths are noted."""
    (tmp_path / "faults").mkdir()
    environment = {FAULTS: str(tmp_path / "faults")}
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
    yield tmp_path / "faults"
    ray.shutdown()


def test_a_run_survives_deaths_in_generation_updates_checkpoint_and_driver(
    faults: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    material = make_material(tmp_path / "material")
    settings = {"trainer__total_training_steps": 6, "trainer__save_freq": 1, **SPLIT}
    run_ppo(as_omegaconf(base_config(material, tmp_path / "undisturbed", **settings)))
    disturbed = base_config(material, tmp_path / "disturbed", trainer__max_restarts=len(POINTS), **settings)
    run_ppo(as_omegaconf(disturbed), task_runner_class=FaultyRunner)
    assert sorted(os.listdir(faults)) == sorted(POINTS)
    assert results(tmp_path / "disturbed") == results(tmp_path / "undisturbed")
    assert caplog.text.count("starting again from") == len(POINTS)
    for words in (
        "actor_rollout rank 0 failed in generate_sequences",
        "critic rank 0 failed in update_critic",
        "critic rank 0 failed in save_checkpoint",
        "task_runner rank 0 failed in run",
    ):
        assert words in caplog.text
