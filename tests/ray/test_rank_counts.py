"""The number of devices and the backend change the speed, not the training; a run may go on with another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.replay import ReplayRunner
from tests.runs import as_omegaconf, base_config, make_material, results

FSDP2 = {"actor_rollout_ref__actor__strategy": "fsdp2", "critic__strategy": "fsdp2"}


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.slow
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
    run = tmp_path / "one"
    older = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(run / "checkpoints/global_step_2")}
    two_ranks = {"trainer__n_gpus_per_node": 2, **FSDP2}
    train_in_process(base_config(material, run, **changes, trainer__save_freq=2), ReplayRunner)
    for name, placement in {"two": two_ranks, "moved": {**two_ranks, **older}}.items():
        config = base_config(material, tmp_path / name, **changes, **placement)
        run_ppo(as_omegaconf(config), task_runner_class=ReplayRunner)
    one, two, moved = (results(tmp_path / name) for name in ("one", "two", "moved"))
    assert_alike(one, two)
    assert_alike(one[-1:], moved)  # its third step, by two ranks that went on from what one rank had saved


CORRECTION = "algorithm__rollout_correction__"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "actor_rollout_ref__actor__policy_loss__loss_mode": "clip_cov",
            "actor_rollout_ref__actor__policy_loss__clip_cov_ratio": 0.05,
            "actor_rollout_ref__actor__policy_loss__clip_cov_lb": 0.01,
            f"{CORRECTION}rollout_is": "token",
            f"{CORRECTION}rollout_rs": "seq_mean_k3",
            f"{CORRECTION}rollout_rs_threshold": 0.1,
        },
        {
            f"{CORRECTION}bypass_mode": True,
            f"{CORRECTION}loss_type": "reinforce",
            f"{CORRECTION}rollout_is": "sequence",
            f"{CORRECTION}rollout_is_batch_normalize": True,
        },
    ],
    ids=["chosen tokens", "bypass"],
)
def test_what_looks_at_a_whole_mini_batch_is_the_same_on_two_ranks(tmp_path: Path, changes: dict[str, Any]) -> None:
    material = make_material(tmp_path / "material")
    common = {
        "data__train_batch_size": 7,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 7,
        "actor_rollout_ref__actor__ppo_epochs": 2,
        "actor_rollout_ref__actor__shuffle": True,
        "trainer__total_training_steps": 2,
        **changes,
    }
    train_in_process(base_config(material, tmp_path / "one", **common), ReplayRunner)
    two_ranks = base_config(material, tmp_path / "two", **common, trainer__n_gpus_per_node=2, **FSDP2)
    run_ppo(as_omegaconf(two_ranks), task_runner_class=ReplayRunner)
    assert_alike(results(tmp_path / "one"), results(tmp_path / "two"))


def assert_alike(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert [set(line) for line in expected] == [set(line) for line in found]
    for line, other in zip(expected, found, strict=True):
        for name, value in line.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (line["step"], name)
