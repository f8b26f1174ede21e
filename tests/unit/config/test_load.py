from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.keys import known_keys
from paceline.config.load import load_config, to_dict, to_dictconfig
from paceline.config.unsupported import UNSUPPORTED_KEYS
from paceline.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "paceline/trainer/config/ppo_trainer.yaml"


def problems_of(config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return caught.value.problems


def test_nothing_gives_all_defaults():
    assert load_config({}) == PPOConfig()
    assert load_config(OmegaConf.create()) == PPOConfig()


def test_a_subset_and_the_shipped_yaml_with_it_give_the_same_config(tmp_path: Path):
    subset = OmegaConf.create({"trainer": {"nnodes": 3}, "critic": {"optim": {"lr": 2e-5}}})
    whole = OmegaConf.merge(OmegaConf.load(SHIPPED), subset)
    cfg = load_config(subset)
    assert cfg == load_config(whole)
    assert cfg.trainer.nnodes == 3
    assert cfg.critic.optim.lr == 2e-5
    assert cfg.critic.optim.weight_decay == PPOConfig().critic.optim.weight_decay


def test_the_critic_keeps_its_own_default_learning_rate_when_a_sibling_key_is_set():
    assert load_config({"critic": {"optim": {"weight_decay": 0.1}}}).critic.optim.lr == 1e-5


def test_a_complete_config_survives_the_way_through_dicts_and_dictconfig():
    cfg = load_config({"trainer": {"logger": ["console"]}, "ray_kwargs": {"ray_init": {"num_cpus": 2}}})
    assert load_config(cfg) == cfg
    assert load_config(to_dict(cfg)) == cfg
    assert load_config(to_dictconfig(cfg)) == cfg


def test_the_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config({}).trainer.nnodes = 2  # type: ignore[misc]


def test_the_dictconfig_of_a_config_refuses_unknown_keys():
    config = to_dictconfig(PPOConfig())
    with pytest.raises(AttributeError):
        _ = config.trainer.nnodez


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_numbers_written_in_any_yaml_way_are_numbers(text: str):
    assert load_config({"critic": {"optim": {"lr": text}}}).critic.optim.lr == 1e-6


def test_a_whole_number_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUM_NODES", "4")
    assert load_config(OmegaConf.create({"trainer": {"nnodes": "${oc.env:NUM_NODES}"}})).trainer.nnodes == 4


def test_interpolations_reach_keys_that_only_the_defaults_have():
    cfg = load_config({"data": {"val_batch_size": "${data.train_batch_size}"}})
    assert cfg.data.val_batch_size == PPOConfig().data.train_batch_size


def test_a_section_may_refer_to_another():
    config = {
        "actor_rollout_ref": {"actor": {"optim": {"lr": 0.5}}},
        "critic": {"optim": "${actor_rollout_ref.actor.optim}"},
    }
    assert load_config(config).critic.optim.lr == 0.5


def test_an_empty_section_is_its_defaults():
    assert load_config(OmegaConf.create("trainer:\ndata:\n  shuffle: false\n")).trainer == PPOConfig().trainer


def test_one_name_stands_for_a_list_of_one():
    assert load_config({"trainer": {"logger": "console"}}).trainer.logger == ["console"]


def test_what_ray_init_holds_is_the_users_own():
    ray_init = {"num_cpus": 2, "runtime_env": {"env_vars": {"A": "b"}}}
    assert load_config({"ray_kwargs": {"ray_init": ray_init}}).ray_kwargs.ray_init == ray_init


def test_paths_are_expanded_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    cfg = load_config(
        {
            "data": {"train_files": ["~/a.parquet", "b.parquet"]},
            "actor_rollout_ref": {"model": {"path": "model", "tokenizer_path": "org/name"}},
            "trainer": {"rollout_data_dir": "train", "validation_data_dir": "~/val"},
        }
    )
    assert (cfg.trainer.rollout_data_dir, cfg.trainer.validation_data_dir) == (
        str(tmp_path / "train"),
        str(tmp_path / "val"),
    )
    assert cfg.data.train_files == [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    assert cfg.actor_rollout_ref.model.path == str(tmp_path / "model")
    assert cfg.actor_rollout_ref.model.tokenizer_path == "org/name"


# The public keys of launch scripts that are neither ours nor nonsense, one of each.
FOREIGN = [
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.rollout.mode",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.actor.megatron.context_parallel_size",
    "actor_rollout_ref.nccl_timeout",
    "reward_model.reward_manager",
    "reward_model.sandbox_fusion.url",
    "reward_model.megatron.param_offload",
    "critic.megatron.override_transformer_config.recompute_granularity",
    "data.image_key",
    "data.trust_remote_code",
]


@pytest.mark.parametrize("key", FOREIGN)
def test_a_known_key_that_is_not_supported_is_an_error_that_says_so(key: str):
    config = OmegaConf.create()
    OmegaConf.update(config, key, "x")
    [problem] = problems_of(config)
    assert "not supported" in problem or "has another place" in problem
    assert key.startswith(problem.split()[0])


def test_no_key_is_both_supported_and_not():
    assert not set(UNSUPPORTED_KEYS) & set(known_keys())


def test_the_config_layer_imports_neither_torch_nor_ray_nor_transformers():
    code = (
        "import sys, paceline.config.checks, paceline.config.describe, paceline.config.overrides\n"
        "print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SHIPPED.parents[3])}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("algorithm.rollout_correction", None),
        ("actor_rollout_ref.rollout.max_model_len", None),
        ("actor_rollout_ref.rollout.prompt_length", "data.max_prompt_length"),
        ("trainer.rollout_is_threshold", None),
        ("data.sampler", None),
        ("trainer.ray_wait_register_center_timeout", None),
        ("critic.n", None),
        ("actor_rollout_ref.actor.clip_ration", "actor_rollout_ref.actor.clip_ratio"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.adv_estimator", "algorithm.adv_estimator"),
        ("algorithm.critic_warmup", "trainer.critic_warmup"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.temperature", "actor_rollout_ref.rollout.temperature"),
        ("trainr", "trainer"),
    ],
)
def test_a_suggestion_is_made_for_a_really_similar_key_and_for_no_other(unknown: str, suggested: str | None):
    [problem] = problems_of(OmegaConf.from_dotlist([f"{unknown}=1"]))
    expected = f"{unknown} is not a key" + (f"; did you mean {suggested}?" if suggested else ".")
    assert problem == expected
