from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from paceline.config import PPOConfig, load
from paceline.config.load import load_config, read_config, to_dict, to_dictconfig
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


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(["???", "${x}", "a${"])
)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["trainer.nnodes", "trainer.logger", "data", "algorithm.gamma", "ray_kwargs.ray_init"]), VALUES)
def test_what_needs_no_resolving_is_read_as_omegaconf_would_give_it(key: str, value: object):
    def outcome() -> str:
        try:
            return repr(read_config(tree))
        except ConfigError as error:
            return str(error)

    tree: dict[str, object] = {}
    *sections, field = key.split(".")
    place = tree
    for section in sections:
        place = place.setdefault(section, {})  # type: ignore[assignment]
    place[field] = value
    quick = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_is_resolved", lambda value: False)
        assert outcome() == quick


def test_the_configuration_holds_nothing_of_what_it_was_given():
    given_by_the_user = {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"A": "1"}}}}}
    cfg = load_config(given_by_the_user)
    given_by_the_user["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]["A"] = "2"
    assert cfg.ray_kwargs.ray_init == {"runtime_env": {"env_vars": {"A": "1"}}}
