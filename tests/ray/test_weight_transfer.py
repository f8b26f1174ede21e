"""Weights to a rollout on devices of its own: broadcast or through the object store, and after a death in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.config import PPOConfig
from paceline.single_controller.base import Dispatch
from paceline.trainer.main_ppo import TaskRunner, run_ppo
from paceline.trainer.ppo.roles import Role
from paceline.workers import weight_calls
from paceline.workers.engine_workers import ActorRolloutRefWorker
from paceline.workers.role_worker import built, role_method
from tests.in_process import train_in_process
from tests.runs import as_omegaconf, base_config, make_material, results

FAULT = "PACELINE_TEST_WEIGHT_FAULT"
"""The environment variable that names the file that is there once a process has died."""
BROADCAST = {
    "trainer__n_gpus_per_node": 2,
    "trainer__placement__rollout_devices": 1,
    "actor_rollout_ref__rollout__weight_transfer": "broadcast",
}


class InManyBuckets(ActorRolloutRefWorker):
    """Sends a tiny model in many buckets, and dies in the middle of a transfer, once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight_calls.BUCKET_BYTES = 4096
        self.transfers = 0

    @role_method(Dispatch.ONE_TO_ALL)
    def receive_broadcast(self, version: int) -> None:
        self.transfers += 1
        fault = Path(os.environ[FAULT])
        if self.transfers == 3 and not fault.exists():
            weights = built(self.channel).receive()
            for _ in range(5):
                next(weights)
            fault.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().receive_broadcast(version)


class ManyBucketsRunner(TaskRunner):
    def add_actor_rollout_worker(self, config: PPOConfig) -> None:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping |= {Role.Actor: InManyBuckets, Role.Rollout: InManyBuckets}


@pytest.mark.slow
def test_a_rollout_that_dies_while_weights_come_has_whole_ones_after_the_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    material = make_material(tmp_path / "material")
    settings = {"trainer__save_freq": 1, "algorithm__adv_estimator": "remax"}
    train_in_process(base_config(material, tmp_path / "undisturbed", **settings))
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {FAULT: str(tmp_path / "fault")}})
    try:
        disturbed = base_config(material, tmp_path / "disturbed", trainer__max_restarts=1, **settings, **BROADCAST)
        run_ppo(as_omegaconf(disturbed), task_runner_class=ManyBucketsRunner)
    finally:
        ray.shutdown()
    assert (tmp_path / "fault").exists()
    assert "rollout rank 0 failed in receive_broadcast: its process" in caplog.text
    assert "was killed by SIGKILL" in caplog.text
    assert results(tmp_path / "disturbed") == results(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["native", "vllm"])
def test_shards_of_several_ranks_come_to_several_engines_bit_for_bit(tmp_path: Path, rollout: str) -> None:
    material = make_material(tmp_path / "material", hidden=128)
    settings = {
        **BROADCAST,
        "actor_rollout_ref__actor__strategy": "fsdp2",
        "actor_rollout_ref__rollout__name": rollout,
        "algorithm__adv_estimator": "remax",
        "trainer__n_gpus_per_node": 4,
        "trainer__placement__rollout_devices": 2,
    }
    if rollout == "vllm":
        settings["actor_rollout_ref__rollout__tensor_model_parallel_size"] = 2
        settings["actor_rollout_ref__rollout__load_format"] = "dummy"
    ray.init("local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {FAULT: str(material)}})
    try:
        for way in ("broadcast", "object_store"):
            settings["actor_rollout_ref__rollout__weight_transfer"] = way
            run_ppo(as_omegaconf(base_config(material, tmp_path / way, **settings)), ManyBucketsRunner)
    finally:
        ray.shutdown()
    assert results(tmp_path / "broadcast") == results(tmp_path / "object_store")
