from __future__ import annotations

import pytest

from paceline.config.overrides import check_overrides, override_tree
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "ready"),
    [
        ("trainer.nnodes=2", "++trainer.nnodes=2"),
        ("+trainer.nnodes=2", "++trainer.nnodes=2"),
        ("++trainer.nnodes=2", "++trainer.nnodes=2"),
        ("ray_kwargs.ray_init.num_cpus=4", "++ray_kwargs.ray_init.num_cpus=4"),
        # Unknown keys pass: load_config lists them with everything else.
        ("trainer.nodes=2", "++trainer.nodes=2"),
        ("data.train_files=~/a.parquet", "++data.train_files='~/a.parquet'"),
        ("~trainer.logger", "~trainer.logger"),
        ("~ray_kwargs.ray_init.num_cpus", "~ray_kwargs.ray_init.num_cpus"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("hydra/job_logging=stdout", "hydra/job_logging=stdout"),
        ("--multirun", "--multirun"),
        ("model_engine=megatron", "++model_engine=megatron"),
        ("--config-name=ppo_megatron_trainer.yaml", "++model_engine=megatron"),
        ("actor@actor_rollout_ref.actor=dp_actor", "++_groups_.actor_rollout_ref.actor=dp_actor"),
        ("trainer.logger=[console,tensorboard]", "++trainer.logger=[console,tensorboard]"),
    ],
)
def test_an_override_is_made_ready_for_hydra(given: str, ready: str):
    assert check_overrides([given]) == [ready]


@pytest.mark.parametrize(
    "argv",
    [["--cfg", "job"], ["--config-name", "mine"], ["--info", "all"], ["-cd", "folder", "experiment=big"]],
)
def test_hydras_own_flags_are_left_alone(argv: list[str]):
    assert check_overrides(argv) == argv


def test_flags_for_the_yaml_that_is_ours_are_left_out():
    assert check_overrides(["--config-path=./config", "--config-name=ppo_trainer", "model_engine=dp"]) == [
        "++model_engine=dp"
    ]
    assert check_overrides(["--config-path", "config", "-cn", "ppo_veomni_trainer"]) == ["++model_engine=veomni"]
    own = ["--config-path=/mine/config", "--config-name=mine"]
    assert check_overrides(own) == own


def test_overrides_become_a_tree_without_hydra():
    asked, tree = override_tree(["+a.b=[1,2]", "a.c='x y'", "trainer.nnodes=1", "trainer.nnodes=2", "hydra.run.dir=x"])
    assert tree == {"a": {"b": [1, 2], "c": "x y"}, "trainer": {"nnodes": 2}}
    assert asked == {"a.b": "a.b=[1,2]", "a.c": "a.c='x y'", "trainer.nnodes": "trainer.nnodes=2"}


def test_an_info_flag_without_a_value_takes_no_override():
    assert check_overrides(["--info", "trainer.nnodes=2"]) == ["--info", "++trainer.nnodes=2"]


def test_what_is_no_override_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        check_overrides(["trainer.nnodes", "trainer.seed=3", "data.val_files=[a", "~trainer.loger"])
    first, second, third = caught.value.problems
    assert first.startswith("'trainer.nnodes' is not an override")
    assert second.startswith("'data.val_files=[a' is not an override")
    assert third == "~trainer.loger: trainer.loger is not a key; did you mean ~trainer.logger?"
