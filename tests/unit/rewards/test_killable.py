"""Calls that hang, crash or break: the response counts as failed, and everything else goes on."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RewardError
from paceline.rewards import RewardManager, Scorer, killable, load_custom_reward
from paceline.rewards.scorer import Row
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch

FUNCTIONS = """
import asyncio, os, re, signal, sys, time

loaded = os.getpid()


class OwnError(Exception):
    pass


def compute_score(data_source, solution_str, ground_truth, extra_info, worth=1.0):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "regex":  # stuck in C, with the lock of the interpreter
        re.match("(a+)+$", "a" * 100 + "b")
    if solution_str == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "raise":
        raise OwnError("my words")
    if solution_str == "lambda":
        return {"score": 1.0, "more": lambda: 1}
    return {"score": worth, "pid": os.getpid()}


async def slow(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "block":
        time.sleep(60)
    await asyncio.sleep(60 if solution_str == "sleep" else 0)
    return 1.0


def of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    if "sleep" in solution_strs:
        time.sleep(60)
    return [1.0] * len(solution_strs)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "reward.py"
    path.write_text(FUNCTIONS)
    return path


def graded(file: Path, texts: list[str], name: str = "compute_score", timeout: float = 0.5, **options: Any) -> dict:
    function = load_custom_reward(file, name)
    manager = RewardManager(
        TOKENIZER, 0, compute_score=function, timeout_seconds=timeout, on_error="zero_and_count", **options
    )
    return manager(make_batch(texts, ["gold"] * len(texts), "my/data"), return_dict=True)


def scores(result: dict) -> list[float]:
    return result["reward_tensor"].sum(-1).tolist()


def test_what_hangs_is_killed_and_counts_and_the_others_are_graded(file: Path) -> None:
    result = graded(file, ["a", "loop", "b", "regex", "c", "stubborn", "sleep", "d"])
    assert scores(result) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert result["metrics"]["reward/grader_errors"] == 4
    assert result["metrics"]["reward/grader_timeouts"] == 4
    assert "longer than reward_model.timeout_seconds=0.5" in result["reward_extra_info"]["error"][1]


def test_a_crash_an_exit_and_an_exception_count_and_say_why(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = graded(file, ["raise", "crash", "exit", "lambda", "a"], timeout=60.0)
    assert scores(result) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert result["metrics"]["reward/grader_errors"] == 4
    assert result["metrics"]["reward/grader_timeouts"] == 0
    errors = result["reward_extra_info"]["error"]
    for error, words in zip(errors, ("my words", "SIGSEGV", "SystemExit(3)", "can't be sent"), strict=False):
        assert words in error
    assert 'raise OwnError("my words")' in caplog.text  # the traceback of the first failure


def test_the_process_stays_between_batches_and_is_not_this_one(file: Path) -> None:
    pids = {graded(file, ["a"], timeout=60.0)["reward_extra_info"]["pid"][0] for _ in range(2)}
    assert len(pids) == 1
    assert pids != {os.getpid()}
    unlimited = RewardManager(TOKENIZER, 0, compute_score=load_custom_reward(file))
    assert unlimited(make_batch(["a"], [""]), return_dict=True)["reward_extra_info"]["pid"][0] == os.getpid()


def test_a_file_is_imported_by_the_process_that_calls_its_function_and_by_no_other(tmp_path: Path) -> None:
    path = tmp_path / "only_where_it_is_called.py"
    path.write_text("import os\nloaded = os.getpid()\n\n\ndef compute_score(**kwargs):\n    return loaded\n")
    arrived = pickle.loads(pickle.dumps(load_custom_reward(path)))
    del sys.modules["paceline_custom_reward_only_where_it_is_called"]  # loading checks the function here
    [loaded] = arrived.grade([Row("a", "b", "c", None)], timeout_seconds=60)
    assert loaded != os.getpid()
    assert "fn" not in vars(arrived)
    assert "paceline_custom_reward_only_where_it_is_called" not in sys.modules


def test_a_function_that_always_hangs_does_not_hang_the_batch(file: Path) -> None:
    started = time.monotonic()
    result = graded(file, ["sleep"] * 200)
    assert time.monotonic() - started < 100
    assert result["metrics"]["reward/grader_timeouts"] == 200
    assert "not tried, since 3 calls in a row" in result["reward_extra_info"]["error"][199]


def test_async_calls_are_cancelled_one_by_one(file: Path) -> None:
    result = graded(file, ["a", "sleep", "b", "sleep"], name="slow")
    assert scores(result) == [1.0, 0.0, 1.0, 0.0]
    assert result["metrics"]["reward/grader_timeouts"] == 2


def test_an_async_function_that_blocks_its_loop_is_killed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable, "GRACE_SECONDS", 0.5)
    result = graded(file, ["block", "a"], name="slow")
    assert result["metrics"]["reward/grader_timeouts"] == 2
    assert scores(graded(file, ["a"], name="slow")) == [1.0]


def test_a_batch_function_has_the_deadline_for_its_batch(file: Path) -> None:
    assert graded(file, ["a", "sleep"], name="of_batch")["metrics"]["reward/grader_timeouts"] == 2
    assert scores(graded(file, ["a", "b"], name="of_batch")) == [1.0, 1.0]


def test_raise_and_retry_hold_for_what_hangs(file: Path) -> None:
    function = load_custom_reward(file)
    manager = RewardManager(TOKENIZER, 0, compute_score=function, timeout_seconds=0.5, on_error="raise")
    with pytest.raises(RewardError, match="TimeoutError"):
        manager(make_batch(["a", "sleep"], ["", ""]))
    manager = RewardManager(TOKENIZER, 0, compute_score=function, timeout_seconds=0.5, on_error="retry", max_retries=1)
    assert manager(make_batch(["sleep"], [""]), return_dict=True)["metrics"]["reward/retries"] == 1


def test_a_scorer_of_the_users_for_one_source_has_the_deadline_too() -> None:
    def hang_on_b(solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        while solution_str == "b":
            time.sleep(1)
        return 1.0

    manager = RewardManager(TOKENIZER, 0, scorers={"mine": Scorer(hang_on_b)}, timeout_seconds=1.0)
    result = manager(make_batch(["a", "b"], ["", ""], "mine"), return_dict=True)
    assert scores(result) == [1.0, 0.0]
    assert result["metrics"]["reward/grader_errors"] == 1
