from __future__ import annotations

import pytest

from paceline.config.overrides import check_overrides
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


def test_an_info_flag_without_a_value_takes_no_override():
    assert check_overrides(["--info", "trainer.nnodes=2"]) == ["--info", "++trainer.nnodes=2"]


def test_what_is_no_override_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        check_overrides(["trainer.nnodes", "trainer.seed=3", "data.val_files=[a", "~trainer.loger"])
    first, second, third = caught.value.problems
    assert first.startswith("'trainer.nnodes' is not an override")
    assert second.startswith("'data.val_files=[a' is not an override")
    assert third == "~trainer.loger: trainer.loger is not a key; did you mean ~trainer.logger?"
