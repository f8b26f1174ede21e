"""PPO's loop with parts of one's own, without a change in paceline:

    python examples/extending/main.py data.train_files=train.parquet actor_rollout_ref.model.path=model \\
        reward_model.enable=True reward_model.model.path=model \\
        'reward_model.weights={openai/gsm8k: {rule: 0, model: 1}}' \\
        algorithm.adv_estimator=median actor_rollout_ref.actor.policy_loss.loss_mode=unclipped \\
        actor_rollout_ref.rollout.n=4

Importing `parts` registers the estimator and the loss; the TaskRunner names the worker classes, and puts the reward
model on the actor's devices, also in split placement, where it would otherwise be beside the critic.
"""

import hydra
import parts

import paceline.trainer
from paceline.trainer.main_ppo import TaskRunner, cli, configure_logging, errors_as_exit_codes, run_ppo
from paceline.trainer.ppo.roles import Role


class Runner(TaskRunner):
    def add_actor_rollout_worker(self, config):
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = parts.Actor

    def add_reward_model_worker(self, config):
        super().add_reward_model_worker(config)
        self.role_worker_mapping[Role.RewardModel] = parts.DigitJudge
        self.mapping[Role.RewardModel] = self.mapping[Role.ActorRollout]


CONFIG = f"{paceline.trainer.__path__[0]}/config"


@hydra.main(config_path=CONFIG, config_name="ppo_trainer", version_base=None)
def main(config):
    configure_logging()
    with errors_as_exit_codes():
        run_ppo(config, task_runner_class=Runner)


if __name__ == "__main__":
    cli(main)
