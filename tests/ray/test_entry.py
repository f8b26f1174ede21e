"""run_ppo with task runners of the test's own, in real Ray: no training, only the way in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import DictConfig

from paceline.errors import PacelineError, WorkerError
from paceline.trainer.main_ppo import run_ppo
from tests.stand_ins import write_model_folder, write_parquet


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "TRANSFER_QUEUE_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    write_parquet(tmp_path / "train.parquet")
    write_model_folder(tmp_path)
    return {
        "data": {"train_files": str(tmp_path / "train.parquet")},
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
        "trainer": {"device": "cpu", "default_local_dir": str(tmp_path / "run")},
        "ray_kwargs": {
            "ray_init": {"num_cpus": 1, "runtime_env": {"env_vars": {"NCCL_DEBUG": "TRACE", "MINE": "yes"}}}
        },
    }


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False)
    yield
    ray.shutdown()


def reporting_runner() -> type:
    """A plain class, local to a function so that Ray ships it by value."""

    class Reporter:
        def run(self, config: DictConfig) -> None:
            folder = Path(config.trainer.default_local_dir)
            folder.mkdir(parents=True, exist_ok=True)
            seen = {
                "environment": dict(os.environ),
                "train_batch_size": config.data.train_batch_size,
                "pid": os.getpid(),
                "cpus": ray.get_runtime_context().get_assigned_resources().get("CPU", 0),
            }
            (folder / "seen.json").write_text(json.dumps(seen))

    return Reporter


def seen_by_runner(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(config["trainer"]["default_local_dir"]) / "seen.json").read_text())


def failing_runner(error: BaseException | None) -> type:
    class Failing:
        def run(self, config: DictConfig) -> None:
            if error is None:
                os._exit(3)
            raise error

    return Failing


def test_run_ppo_starts_ray_with_the_environment_and_stops_it_again(config: dict[str, Any], tmp_path: Path):
    assert not ray.is_initialized()
    config["ray_kwargs"]["timeline_json_file"] = str(tmp_path / "new/timeline.json")
    run_ppo(config, task_runner_class=reporting_runner())
    assert not ray.is_initialized()

    seen = seen_by_runner(config)
    assert seen["pid"] != os.getpid()
    assert seen["cpus"] == 0
    assert seen["train_batch_size"] == 1024  # a key that only the defaults have
    assert seen["environment"]["VLLM_LOGGING_LEVEL"] == "WARN"
    assert seen["environment"]["NCCL_DEBUG"] == "TRACE"
    assert seen["environment"]["MINE"] == "yes"
    assert isinstance(json.loads((tmp_path / "new/timeline.json").read_text()), list)


@pytest.mark.parametrize("is_remote", [False, True], ids=["plain", "remote"])
def test_run_ppo_uses_a_running_ray_and_leaves_it(
    is_remote: bool, config: dict[str, Any], running_ray: None, caplog: pytest.LogCaptureFixture
):
    runner = reporting_runner()
    run_ppo(config, task_runner_class=ray.remote(num_cpus=0)(runner) if is_remote else runner)
    assert ray.is_initialized()
    environment = seen_by_runner(config)["environment"]
    assert environment["VLLM_LOGGING_LEVEL"] == "WARN"
    assert environment["NCCL_DEBUG"] == "TRACE"
    assert "TRANSFER_QUEUE_ENABLE" not in environment
    assert "not used: ['num_cpus']" in caplog.text


def test_our_errors_arrive_as_themselves(config: dict[str, Any], running_ray: None):
    with pytest.raises(WorkerError) as caught:
        run_ppo(config, failing_runner(WorkerError("critic", 1, "update_critic", "out of memory")))
    assert type(caught.value) is WorkerError
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("critic", 1, "update_critic")
    assert ray.is_initialized()


def test_errors_of_users_keep_their_type_and_their_remote_traceback(config: dict[str, Any], running_ray: None):
    with pytest.raises(KeyError, match="in run"):
        run_ppo(config, failing_runner(KeyError("what the user's code did")))


def test_a_task_runner_that_dies_is_an_error(config: dict[str, Any], running_ray: None):
    with pytest.raises(PacelineError, match="task_runner rank 0 failed in run"):
        run_ppo(config, failing_runner(None))
