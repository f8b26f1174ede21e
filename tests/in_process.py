"""A run of the real trainer with its workers in this process: for learning tests, which need no Ray."""

from __future__ import annotations

import gc
from typing import Any

from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs import as_omegaconf


def build_in_process(config: dict[str, Any], task_runner_class: type[TaskRunner] = TaskRunner) -> RayPPOTrainer:
    """The trainer of a run, its workers in this process and ready."""
    trainer = task_runner_class().build_trainer(complete_config(as_omegaconf(config)), InProcessWorkerGroup)
    trainer.init_workers()
    return trainer


def train_in_process(config: dict[str, Any], task_runner_class: type[TaskRunner] = TaskRunner) -> None:
    """What `TaskRunner.run` does, without Ray."""
    try:
        build_in_process(config, task_runner_class).fit()
    finally:
        gc.collect()  # now, not in the middle of a later run: with its last object, vLLM ends all process groups
