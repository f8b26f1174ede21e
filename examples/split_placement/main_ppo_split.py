"""PPO with actor, rollout and reference on one pool, critic and reward model on another, put together by hand.

    python examples/split_placement/main_ppo_split.py --config-path=config --config-name=ppo_trainer_split key=value ...

The ordinary entry does the same with `trainer.placement.name=split`.
"""

import hydra
from omegaconf import DictConfig

from paceline.config.load import load_config
from paceline.rewards import RewardManager
from paceline.trainer.main_ppo import (
    TaskRunner,
    cli,
    configure_logging,
    errors_as_exit_codes,
    make_reward_fn,
    run_ppo,
)

__all__ = ["RewardManager", "SplitTaskRunner", "main"]


class SplitTaskRunner(TaskRunner):
    """Builds the pools and says which role runs where. It runs inside Ray, since it drives the workers."""

    @classmethod
    def look_ahead(cls, config):
        """Its trainer reads the data and rewards that the configuration names: they are checked before Ray starts."""
        from paceline.trainer.preflight import preflight

        preflight(config)

    def build_trainer(self, config, ray_worker_group_cls=None):
        """The trainer, with a pool for the policy and one for the critic."""
        from split_monkey_patch import fit

        from paceline.data.tokenizer import load_tokenizer
        from paceline.single_controller.ray import RayWorkerGroup
        from paceline.trainer.ppo.placement import plan_pools, uses_critic, uses_reference, uses_reward_model
        from paceline.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

        complete = load_config(config)

        # {"actor_rollout_ref_pool": [1], "critic_pool": [1]} for two devices of one node
        pools = plan_pools(complete)

        role_worker_mapping = {Role.ActorRollout: ActorRolloutRefWorker}
        mapping = {Role.ActorRollout: "actor_rollout_ref_pool"}
        if uses_reference(complete):
            role_worker_mapping[Role.RefPolicy] = ActorRolloutRefWorker
            mapping[Role.RefPolicy] = "actor_rollout_ref_pool"
        if uses_critic(complete):
            role_worker_mapping[Role.Critic] = TrainingWorker
            mapping[Role.Critic] = "critic_pool"
        if uses_reward_model(complete):
            role_worker_mapping[Role.RewardModel] = TrainingWorker
            mapping[Role.RewardModel] = "critic_pool"

        model = complete.actor_rollout_ref.model
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        RayPPOTrainer.fit = fit
        return RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=ResourcePoolManager(resource_pool_spec=pools, mapping=mapping),
            ray_worker_group_cls=ray_worker_group_cls or RayWorkerGroup,
            reward_fn=make_reward_fn(config, tokenizer, num_examine=0),
            val_reward_fn=make_reward_fn(config, tokenizer, num_examine=1, validation=True),
        )


@hydra.main(config_path="config", config_name="ppo_trainer_split", version_base=None)
def main(config: DictConfig) -> None:
    """Check the configuration, start Ray if none runs, and run SplitTaskRunner in it to its end."""
    configure_logging()
    with errors_as_exit_codes():
        run_ppo(config, task_runner_class=SplitTaskRunner)


if __name__ == "__main__":
    cli(main)
