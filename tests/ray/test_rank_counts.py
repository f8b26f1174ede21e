"""The number of devices and the backend change the speed, not the training; what users register takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.replay import ReplayRunner
from tests.runs import as_omegaconf, base_config, make_material, results

FSDP2 = {"actor_rollout_ref__actor__strategy": "fsdp2", "critic__strategy": "fsdp2"}


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_two_sharded_ranks_train_like_one_process_on_recorded_responses(tmp_path: Path) -> None:
    material = make_material(tmp_path / "material")
    changes: dict[str, Any] = {
        "data__train_batch_size": 7,  # does not divide by two ranks
        "actor_rollout_ref__actor__ppo_mini_batch_size": 7,
        "actor_rollout_ref__actor__ppo_epochs": 2,
        "actor_rollout_ref__actor__shuffle": True,
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref__actor__entropy_coeff": 0.01,
        "algorithm__use_kl_in_reward": True,
        "trainer__total_training_steps": 3,
    }
    for name, placement in (
        ("one", {}),
        ("two", {"trainer__n_gpus_per_node": 2, **FSDP2}),
    ):
        config = base_config(material, tmp_path / name, **changes, **placement)
        run_ppo(as_omegaconf(config), task_runner_class=ReplayRunner)
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert [set(line) for line in one] == [set(line) for line in two]
    for expected, found in zip(one, two, strict=True):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (expected["step"], name)


def test_an_estimator_and_a_loss_registered_beside_runner_and_worker_are_used(tmp_path: Path) -> None:
    config = base_config(
        make_material(tmp_path / "material"),
        tmp_path / "run",
        algorithm__adv_estimator="reward_to_go",
        actor_rollout_ref__actor__policy_loss__loss_mode="unclipped",
        trainer__total_training_steps=1,
    )
    run_ppo(as_omegaconf(config), task_runner_class=ReplayRunner)
    last = results(tmp_path / "run")[-1]
    assert last["actor/tokens_seen"] == pytest.approx(1.0)  # tokens over tokens of the mini-batch
    assert last["critic/returns/max"] == pytest.approx(last["critic/score/max"])
    assert "critic/vf_loss" not in last
