from __future__ import annotations

import json

import pytest

from paceline.errors import ConfigError
from paceline.trainer.constants_ppo import (
    PPO_RAY_RUNTIME_ENV,
    get_ppo_ray_runtime_env,
    merged_runtime_env,
    without_those_of_the_job,
)


@pytest.fixture(autouse=True)
def empty_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PPO_RAY_RUNTIME_ENV["env_vars"]:
        monkeypatch.delenv(name, raising=False)


def test_workers_get_our_variables():
    variables = get_ppo_ray_runtime_env()["env_vars"]
    assert variables == PPO_RAY_RUNTIME_ENV["env_vars"]
    assert variables["TOKENIZERS_PARALLELISM"] == "true"
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["VLLM_LOGGING_LEVEL"] == "WARN"


def test_what_the_shell_sets_is_left_to_the_shell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert "NCCL_DEBUG" not in get_ppo_ray_runtime_env()["env_vars"]
    assert "NCCL_DEBUG" in PPO_RAY_RUNTIME_ENV["env_vars"]


def test_the_shells_value_reaches_nodes_that_did_not_inherit_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert merged_runtime_env()["env_vars"]["NCCL_DEBUG"] == "INFO"


def test_the_users_runtime_env_wins_over_the_shell_and_keeps_its_other_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    user = {"env_vars": {"NCCL_DEBUG": "TRACE", "MINE": 3}, "working_dir": "folder"}
    merged = merged_runtime_env(user)
    assert merged["working_dir"] == "folder"
    assert merged["env_vars"] == {**PPO_RAY_RUNTIME_ENV["env_vars"], "NCCL_DEBUG": "TRACE", "MINE": "3"}
    assert user["env_vars"] == {"NCCL_DEBUG": "TRACE", "MINE": 3}


def test_variables_that_a_submitted_job_carries_are_left_to_it(monkeypatch: pytest.MonkeyPatch):
    """Ray refuses what both `ray job submit` and its driver set."""
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO", "MINE": "1"}}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # as Ray sets it in the job's own process
    variables = merged_runtime_env()["env_vars"]
    assert variables == {k: v for k, v in PPO_RAY_RUNTIME_ENV["env_vars"].items() if k != "NCCL_DEBUG"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": None}))
    assert merged_runtime_env()["env_vars"]["NCCL_DEBUG"] == "INFO"


def test_what_a_user_and_the_submitted_job_set_alike_is_left_to_the_job_and_what_differs_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
):
    job = {"runtime_env": {"env_vars": {"MINE": "1", "HF_TOKEN": "secret"}, "working_dir": "a", "pip": ["x"]}}
    user = {"env_vars": {"MINE": 1, "OTHER": "2"}, "working_dir": "a", "config": {}}
    assert without_those_of_the_job(user) == {"env_vars": {"MINE": "1", "OTHER": "2"}, "working_dir": "a", "config": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert without_those_of_the_job(user) == {"env_vars": {"OTHER": "2"}, "config": {}}
    with pytest.raises(ConfigError) as caught:
        without_those_of_the_job({"env_vars": {"HF_TOKEN": "another secret"}, "pip": ["y"]})
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "ray_kwargs.ray_init.runtime_env.pip", "ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN",
    ]  # fmt: skip
    assert "secret" not in str(caught.value)
