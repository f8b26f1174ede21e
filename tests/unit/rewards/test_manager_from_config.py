"""From a configuration to a manager, and with it into another process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline.config import SandboxConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError, SandboxUnavailableError
from paceline.rewards import (
    Overlong,
    RewardManager,
    by_source,
    load_custom_reward,
    make_reward_manager,
    register_scorer,
)
from paceline.rewards.by_source import CODE_SOURCES, code_scorer
from paceline.rewards.sandbox import LocalSandbox, RemoteSandbox, _sandbox
from paceline.rewards.score import code
from paceline.rewards.score.code import CodeGrader
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch

PROGRAM = "```python\nprint(1)\n```"
HALF = {"inputs": ["", ""], "outputs": ["1\n", "2\n"]}


def build(**sections: Any) -> RewardManager:
    return make_reward_manager(load_config(sections), TOKENIZER, num_examine=0)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_source._SCORERS, "_entries", dict(by_source._SCORERS._entries))


def test_the_defaults_are_those_of_a_bare_manager_with_a_deadline():
    manager, bare = build(), RewardManager(TOKENIZER, 0, timeout_seconds=300.0)
    same = {key: value for key, value in vars(bare).items() if key != "scorers"} | {"on_error": "zero_and_count"}
    assert {key: value for key, value in vars(manager).items() if key != "scorers"} == same
    assert set(manager.scorers) == set(CODE_SOURCES)


def test_every_key_arrives(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info, bonus):\n    return bonus\n")
    manager = build(
        data={"reward_fn_key": "scorer", "max_response_length": 200},
        custom_reward_function={"path": str(file), "name": "score", "reward_kwargs": {"bonus": 0.25}},
        reward_model={
            "enable": True,
            "weights": {"a": {"model": 0.5}},
            "on_error": "retry",
            "max_retries": 7,
            "sandbox": {"mode": "all"},
            "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 20, "penalty_factor": 0.5, "log": True}},
        },
    )
    assert manager(make_batch(["a"], [""])).sum() == 0.25
    assert (manager.reward_fn_key, manager.on_error, manager.max_retries) == ("scorer", "retry", 7)
    assert manager.weights is not None
    assert manager.weights["a"].model == 0.5
    assert manager.overlong == Overlong(max_len=200, buffer_len=20, penalty_factor=0.5, log=True)
    assert manager.scorers["apps"].one == CodeGrader(SandboxConfig(mode="all"))


def test_max_resp_len_goes_before_the_limit_of_the_data():
    buffer = {"overlong_buffer_cfg": {"enable": True, "len": 20}, "max_resp_len": 100}
    manager = build(data={"max_response_length": 200}, reward_model={"reward_kwargs": buffer})
    assert manager.overlong is not None
    assert manager.overlong.max_len == 100


@pytest.mark.usefixtures("_own_registry")
def test_a_scorer_that_the_user_registered_for_code_stays():
    register_scorer("apps", lambda solution_str, ground_truth, extra_info=None: 0.125)
    manager = build()
    assert "apps" not in manager.scorers
    assert manager(make_batch(["x"], ["y"], "apps")).sum() == 0.125


def test_sandbox_keys_become_settings_of_the_sandbox(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(code.SANDBOX_URL, raising=False)
    config = SandboxConfig(
        wall_seconds=3.5, cpu_seconds=2, memory_limit_mb=100, max_concurrent=5, timeout_seconds=9, retries=1
    )
    local = _sandbox(config, None)
    assert isinstance(local, LocalSandbox)
    assert (local.limits.wall_seconds, local.limits.cpu_seconds, local.limits.memory_bytes) == (3.5, 2, 100 << 20)
    assert local.num_parallel == 5
    remote = _sandbox(config, "http://sandbox:8080")
    assert isinstance(remote, RemoteSandbox)
    assert (remote.concurrency, remote.timeout_seconds, remote.retries) == (5, 9, 1)
    assert remote.limits == local.limits
    assert _sandbox(SandboxConfig(), "http://sandbox:8080").concurrency == 16  # type: ignore[attr-defined]
    assert _sandbox(config, None) is local  # all graders of a process share one


def test_the_service_of_the_environment_is_used_where_no_url_is_set(monkeypatch, caplog):
    monkeypatch.setenv(code.SANDBOX_URL, "http://127.0.0.1:9")
    config = SandboxConfig(retries=0)
    with caplog.at_level(logging.WARNING):
        code_scorer(config).check()  # type: ignore[misc]
        assert "http://127.0.0.1:9 can't be reached now" in caplog.text
        caplog.clear()
        code_scorer(replace(config, url="http://127.0.0.1:10")).check()  # type: ignore[misc]
        assert "http://127.0.0.1:10 can't be reached now" in caplog.text
    [result] = CodeGrader(config).many([PROGRAM], [HALF], [None])
    assert isinstance(result, RuntimeError)
    assert "127.0.0.1:9" in str(result)


def test_a_machine_without_isolation_is_found_by_the_check(monkeypatch):
    def unavailable(self: LocalSandbox) -> None:
        raise SandboxUnavailableError("no user namespaces")

    monkeypatch.delenv(code.SANDBOX_URL, raising=False)
    monkeypatch.setattr(LocalSandbox, "check", unavailable)
    manager = build()
    manager.check(["gsm8k"], [{"ground_truth": "1"}])
    with pytest.raises(SandboxUnavailableError):
        manager.check(["gsm8k", "taco"], [{"ground_truth": "1"}] * 2)


@pytest.mark.usefixtures("isolation")
def test_the_mode_of_the_sandbox_decides_the_score():
    batch = make_batch(["print(1)"], [HALF], "apps")
    assert build(reward_model={"sandbox": {"mode": "fraction"}})(batch).sum() == 0.5
    result = build(reward_model={"sandbox": {"mode": "all"}})(batch, return_dict=True)
    assert result["reward_tensor"].sum() == 0
    assert result["reward_extra_info"]["tests_passed"].tolist() == [0.5]


CUSTOM = """
import asyncio

async def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, bonus):
    await asyncio.sleep(0)
    return [float(text == truth) + bonus for text, truth in zip(solution_strs, ground_truths)]
"""


def grade_what_comes(connection: Connection, folder: Path) -> None:
    os.chdir(folder)
    while pickled := connection.recv_bytes():
        connection.send(here(*cloudpickle.loads(pickled)))


@pytest.fixture
def another_process(tmp_path: Path) -> Iterator[Connection]:
    """A process in a folder of its own. It is forked, so torch is loaded, before a test registers or imports anything:
    what a manager needs of that has to arrive with it."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe()
    (folder := tmp_path / "another").mkdir()
    process = forks.Process(target=grade_what_comes, args=(theirs, folder))
    process.start()
    theirs.close()
    yield ours
    ours.send_bytes(b"")
    process.join()


def graded_in(process: Connection, manager: RewardManager, batch: Any) -> tuple[list[list[float]], dict[str, float]]:
    """What the manager gives in a process that gets it pickled."""
    process.send_bytes(cloudpickle.dumps((manager, batch)))
    return process.recv()


def here(manager: RewardManager, batch: Any) -> tuple[list[list[float]], dict[str, float]]:
    result = manager(batch, return_dict=True)
    return result["reward_tensor"].tolist(), result["metrics"]


def test_a_function_of_a_file_grades_the_same_in_another_process(another_process, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM)
    custom = {"path": str(file), "name": "compute_scores", "reward_kwargs": {"bonus": 0.25}}
    manager = build(custom_reward_function=custom)
    batch = make_batch(["a", "b", ""], ["a", "a", "a"], "my/data")
    rewards, metrics = graded_in(another_process, manager, batch)
    assert (rewards, metrics) == here(manager, batch)
    assert [sum(row) for row in rewards] == [1.25, 0.25, 0.0]


@pytest.mark.usefixtures("_own_registry", "isolation")
def test_registered_scorers_and_sandbox_settings_arrive_in_another_process(another_process):
    factor = 0.5
    register_scorer("my/data", lambda solution_str, ground_truth, extra_info=None: factor * len(solution_str))
    manager = build(reward_model={"sandbox": {"mode": "all"}, "enable": True, "weights": {"gsm8k": {"model": 1.0}}})
    batch = make_batch(
        ["abc", "print(1)", "#### 42", "hello"],
        ["", HALF, "42", None],
        ["my/data", "apps", "gsm8k", "Dahoas/full-hh-rlhf"],
    )
    rewards, metrics = graded_in(another_process, manager, batch)
    assert (rewards, metrics) == here(manager, batch)
    assert [sum(row) for row in rewards] == [1.5, 0.0, 1.0, 0.0]


def test_a_custom_function_is_loaded_once_per_process(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM)
    first = load_custom_reward(file, "compute_scores", {"bonus": 1.0})
    again = pickle.loads(pickle.dumps(first))
    assert again.fn is first.fn
    assert (again.path, again.name, again.kwargs) == (first.path, first.name, first.kwargs)


def test_a_file_that_is_missing_where_it_arrives_is_named(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM)
    pickled = pickle.dumps(load_custom_reward(file, "compute_scores", {"bonus": 1.0}))
    file.unlink()
    with pytest.raises(ConfigError, match=r"mine\.py'.*there is no such file on "):
        pickle.loads(pickled)
