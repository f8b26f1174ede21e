from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.secrets import masked
from paceline.report.environment import LAUNCH_VARIABLE, describe_environment, describe_launch, launch_variables


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.prompt_key", "prompt"),
        ("data.reward_fn_key", "data_source"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 16384),
        ("actor_rollout_ref.rollout.max_num_batched_tokens", 8192),
        ("reward_model.sandbox.url", "https://host/run"),
        ("x.password", None),
    ],
)
def test_what_only_looks_like_a_secret_is_shown(name: str, value: object) -> None:
    assert masked(name, value) == value


def test_secrets_are_masked_at_any_depth_and_in_texts() -> None:
    runtime = {"env_vars": {"WANDB_API_KEY": "123", "HF_TOKEN": "x", "PATH": "/bin"}, "pip": ["a", "hf_abcdefgh1234"]}
    shown = masked("ray_kwargs.ray_init.runtime_env", runtime)
    assert shown == {"env_vars": {"WANDB_API_KEY": "***", "HF_TOKEN": "***", "PATH": "/bin"}, "pip": ["a", "***"]}


def test_the_launching_process_tells_its_command_folder_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceline train", "trainer.seed=1", "a.HF_TOKEN=hidden"])
    launch = describe_launch()
    assert launch["command"] == ["paceline train", "trainer.seed=1", "a.HF_TOKEN=***"]
    assert launch["folder"] == str(tmp_path)
    assert len(launch["git"]["commit"]) == 40
    assert launch["git"]["has_changes"] is False
    (tmp_path / "file").write_text("2")
    assert describe_launch()["git"]["has_changes"] is True

    # Another process, in another folder, knows it by the variable.
    monkeypatch.setenv(LAUNCH_VARIABLE, launch_variables()[LAUNCH_VARIABLE])
    monkeypatch.chdir("/")
    described = describe_environment(devices={"kind": "cpu"})
    assert described["folder"] == str(tmp_path)
    assert described["devices"] == {"kind": "cpu"}
    assert {"torch", "ray", "transformers"} <= set(described["packages"])


def test_no_repository_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_launch()["git"] is None


def test_a_run_writes_its_environment(finished_run: Path) -> None:
    written = json.loads((finished_run / "environment.json").read_text())
    assert written["devices"] == {"kind": "cpu", "nodes": 1, "per_node": 2}
    assert written["cores"] == len(os.sched_getaffinity(0))
