"""A reward model on devices of its own, on a real Ray: other processes, the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import as_omegaconf, results

pytestmark = pytest.mark.slow


def test_a_reward_model_on_a_pool_of_its_own_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    material = make_mixed_material(tmp_path / "mixed")
    train_in_process(mixed_config(material, tmp_path / "alone"))
    ray.init("local", num_cpus=2, include_dashboard=False)
    try:
        own = mixed_config(material, tmp_path / "own", reward_model__enable_resource_pool=True)
        run_ppo(as_omegaconf(own))
    finally:
        ray.shutdown()
    assert results(tmp_path / "own") == results(tmp_path / "alone")
