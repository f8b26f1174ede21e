from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.catalog import ESTIMATORS, EstimatorEntry
from paceline.config.checks import check_config, validate
from paceline.config.load import load_config
from tests.stand_ins import with_changes

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "org/rm"}


def test_the_smallest_config_has_no_problem(good: dict[str, Any]):
    assert validate(good) == load_config(good)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2},
        {"algorithm.adv_estimator": "rloo", f"{ROLLOUT}.n": 2, "algorithm.filter_groups.enable": True},
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.filter_groups.max_num_gen_batches": -1},
        {"algorithm.adv_estimator": "remax", f"{ACTOR}.policy_loss.loss_mode": "cispo"},
        {"trainer.n_gpus_per_node": 4, "trainer.placement.name": "split"},
        {"trainer.n_gpus_per_node": 3, "trainer.placement.name": "split", "trainer.placement.critic_devices": 1},
        {"trainer.nnodes": 2, "trainer.placement.name": "split", f"{ACTOR}.strategy": "local"},
        {
            "algorithm.adv_estimator": "grpo",
            f"{ROLLOUT}.n": 2,
            "trainer.n_gpus_per_node": 2,
            "trainer.placement.name": "split",
        },
        {"actor_rollout_ref.model.path": "org/name"},
        {"data.train_files": ["{train}", "{train}"]},
        {"critic.strategy": "local", f"{ACTOR}.strategy": "local"},
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["q_proj", "v_proj"]},
        {f"{MODEL}.lora_rank": 8, f"{ACTOR}.strategy": "local", f"{ACTOR}.fsdp_config.optimizer_offload": True},
        {f"{MODEL}.compute_dtype": "bfloat16", f"{ACTOR}.strategy": "fsdp"},
        {**REWARD_MODEL, "reward_model.weights": {"openai/gsm8k": {"rule": 1, "model": 0.2}, "default": {"model": 1}}},
        {**REWARD_MODEL, "reward_model.strategy": "local"},
        {
            **REWARD_MODEL,
            "reward_model.strategy": "local",
            "trainer.n_gpus_per_node": 3,
            "trainer.placement.name": "split",
            "trainer.placement.critic_devices": 1,
        },
        {"reward_model.strategy": "local", "trainer.n_gpus_per_node": 2},  # there is no reward model
        {"reward_model.sandbox.wall_seconds": 60},  # nothing waits for an answer of a service
        {f"{OVERLONG}.enable": True, "data.max_response_length": 4096},
        {"data.val_files": "{train}", "trainer.test_freq": 5, "trainer.val_only": True},
        # With grpo there is no critic, so its model and mini-batch have no part.
        {
            "algorithm.adv_estimator": "grpo",
            f"{ROLLOUT}.n": 2,
            "critic.model.path": "{missing}/model",
            "critic.ppo_mini_batch_size": 7,
        },
    ],
)
def test_good_configs_have_no_problem(good: dict[str, Any], files: dict[str, Path], changes: dict[str, Any]):
    if isinstance(changes.get("data.train_files"), list):
        changes = {"data.train_files": [str(files["train"])] * 2}
    validate(with_changes(good, changes, files))


def test_names_that_users_registered_are_accepted(
    good: dict[str, Any], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    config = load_config(with_changes(good, {"algorithm.adv_estimator": "mine"}, files))
    assert check_config(config)
    monkeypatch.setattr(ESTIMATORS, "_registered", {"mine": EstimatorEntry()})
    assert not check_config(config)


def test_a_tracker_whose_package_is_missing_is_a_problem_that_names_the_extra(
    good: dict[str, Any], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    config = load_config(with_changes(good, {"trainer.logger": ["console", "wandb"]}, files))
    assert not check_config(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = check_config(config)
    assert problem.endswith("pip install wandb==0.28.2")


def test_cpus_may_be_0_where_gpus_count_devices(good: dict[str, Any], files: dict[str, Path]):
    for device, is_refused in (("cpu", True), ("cuda", False)):
        changes = {"trainer.cpus_per_device": 0, "trainer.device": device}
        assert bool(check_config(load_config(with_changes(good, changes, files)))) == is_refused
