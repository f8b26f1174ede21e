"""A run whose processes kill themselves, once each, at chosen points."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed

from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch
from paceline.trainer.main_ppo import TaskRunner
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.roles import Role
from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, role_method

POINTS = ("generation", "updates", "checkpoint", "driver")
FAULTS = "PACELINE_TEST_FAULTS"
"""The environment variable that names the folder in which past deaths are noted."""
PAST = frozenset(os.listdir(os.environ[FAULTS])) if FAULTS in os.environ else frozenset()
"""The deaths before this process began to work for the run: one at a time, each in an attempt of its own."""


def strike(point: str, *, ready: bool) -> None:
    """Die as if the kernel had run out of memory, if all earlier points are past and this one is not."""
    folder = Path(os.environ[FAULTS])
    earlier = POINTS[: POINTS.index(point)]
    if ready and not (folder / point).exists() and PAST.issuperset(earlier):
        (folder / point).touch()
        time.sleep(0.5)  # the answer to the call before is on its way, and would be lost with the process
        os.kill(os.getpid(), signal.SIGKILL)


class FaultyActor(ActorRolloutRefWorker):
    calls = 0

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.calls += 1
        strike("generation", ready=self.calls == 3)
        return super().generate_sequences(prompts)


class FaultyCritic(TrainingWorker):
    updates = 0
    saves = 0

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        self.updates += 1
        strike("updates", ready=self.updates == 2)
        return super().update_critic(data)

    @role_method(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        self.saves += 1
        super().save_checkpoint(folder)
        strike("checkpoint", ready=self.saves == 2)


class UnsavedActor(ActorRolloutRefWorker):
    """Its first rank can't save, and the others wait for it."""

    @role_method(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        if self.rank == 0:
            raise OSError("no space left")
        torch.distributed.barrier()


class UnsavedRunner(TaskRunner):
    def add_actor_rollout_worker(self, config: Any) -> None:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = UnsavedActor


class FaultyRunner(TaskRunner):
    def add_actor_rollout_worker(self, config: Any) -> None:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = FaultyActor

    def add_critic_worker(self, config: Any) -> None:
        super().add_critic_worker(config)
        self.role_worker_mapping[Role.Critic] = FaultyCritic

    def build_trainer(self, config: Any, ray_worker_group_cls: Any = None) -> RayPPOTrainer:
        trainer = super().build_trainer(config, ray_worker_group_cls)
        score = trainer.score

        def deadly_score(batch: DataProto, *options: Any) -> Any:
            strike("driver", ready=trainer.global_step == 5)
            return score(batch, *options)

        trainer.score = deadly_score  # type: ignore[method-assign]
        return trainer
