"""A run of the real trainer with its workers in this process: for learning tests, which need no Ray."""

from __future__ import annotations

from typing import Any

from paceline.data.tokenizer import load_tokenizer
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config, make_reward_fn
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.runs import as_omegaconf


def train_in_process(config: dict[str, Any]) -> RayPPOTrainer:
    """What `TaskRunner.run` does, without Ray."""
    complete = complete_config(as_omegaconf(config))
    runner = TaskRunner()
    runner.add_actor_rollout_worker(complete)
    runner.add_critic_worker(complete)
    runner.add_ref_policy_worker(complete)
    tokenizer = load_tokenizer(complete.actor_rollout_ref.model.path)
    trainer = RayPPOTrainer(
        config=complete,
        tokenizer=tokenizer,
        role_worker_mapping=runner.role_worker_mapping,
        resource_pool_manager=runner.init_resource_pool_mgr(complete),
        ray_worker_group_cls=InProcessWorkerGroup,
        reward_fn=make_reward_fn(complete, tokenizer, num_examine=0),
        val_reward_fn=make_reward_fn(complete, tokenizer, num_examine=1),
    )
    trainer.init_workers()
    trainer.fit()
    return trainer
