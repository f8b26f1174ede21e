"""From what a user gave to the configuration of a run: the device, the folder, and all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.load import load_config, to_dictconfig
from paceline.errors import ConfigError
from paceline.trainer import complete, main_ppo
from paceline.trainer.device import detect_device
from paceline.trainer.main_ppo import auto_set_device, complete_config


def test_a_default_folder_that_cannot_be_made_is_listed_with_the_other_problems(
    good: dict[str, Any], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError) as caught:
        complete_config({**good, "trainer": {"seed": -1}})
    about = [problem.split()[0] for problem in caught.value.problems]
    assert about == ["trainer.seed=-1", "trainer.default_local_dir:"]


def test_the_complete_config_has_device_and_folder(good: dict[str, Any], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = complete_config({**good, "trainer": {"project_name": "p", "experiment_name": "e"}})
    assert cfg.trainer.device == detect_device()
    assert cfg.trainer.default_local_dir == str(tmp_path / "runs/p/e")


def test_the_device_of_a_cluster_is_asked_for_when_it_is_joined(good: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """The node of the command may have none of its own."""
    joining = {**good, "ray_kwargs": {"ray_init": {"address": "auto"}}}
    assert complete_config(joining).trainer.device is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert complete_config(good).trainer.device is None
    typed = complete_config({**joining, "trainer": {"device": "cpu"}})
    assert main_ppo.with_device(typed).trainer.device == "cpu"
    monkeypatch.setattr(complete, "detect_device", lambda: "cuda")
    assert main_ppo.with_device(complete_config(good)).trainer.device == "cuda"


def test_auto_set_device_fills_only_what_is_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(complete, "detect_device", lambda: "npu")
    config = to_dictconfig(PPOConfig())
    auto_set_device(config)
    assert config.trainer.device == "npu"
    subset = OmegaConf.create({"data": {}})
    assert auto_set_device(subset).trainer.device == "npu"
    assert auto_set_device(PPOConfig()).trainer.device == "npu"
    assert auto_set_device(load_config({"trainer": {"device": "cpu"}})).trainer.device == "cpu"
    chosen = OmegaConf.create({"trainer": {"device": "cuda"}})
    assert auto_set_device(chosen).trainer.device == "cuda"
