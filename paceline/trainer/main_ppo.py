"""The entry of a run: checks the configuration, starts Ray, and runs a TaskRunner to its end.

    python -m paceline.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=model

or, from Python, `run_ppo(OmegaConf.load("my.yaml"))`. Ray, torch and transformers are imported where they are needed:
a bad configuration and --help answer at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from paceline.command_line import errors_as_exit_codes, hydra_errors_as_ours, shown_without_our_frames
from paceline.config import PPOConfig
from paceline.config.derived import run_dir_of
from paceline.config.describe import render_help
from paceline.config.dialect.translation import notes_line, notes_text
from paceline.config.load import Config, Reading, load_config, read_config
from paceline.config.overrides import check_overrides
from paceline.errors import ConfigError
from paceline.external import import_external
from paceline.log_file import configure_logging, log_process, terminal_lines
from paceline.run_folder import LOGS_FOLDER
from paceline.trainer.complete import auto_set_device, complete_config, complete_reading, with_device
from paceline.trainer.launch import run_with_restarts, running_ray
from paceline.trainer.same_command import one_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.rewards import RewardManager
    from paceline.single_controller.ray import RayWorkerGroup
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
    from paceline.trainer.ppo.roles import ResourcePoolManager

__all__ = [
    "TaskRunner",
    "auto_set_device",
    "cli",
    "complete_config",
    "configure_logging",
    "errors_as_exit_codes",
    "main",
    "make_reward_fn",
    "run_ppo",
]

logger = logging.getLogger(__name__)


class TaskRunner:
    """Drives a run from inside Ray. Subclass it to change a part, and give the subclass to `run_ppo`.

    The `add_*_worker` methods fill `role_worker_mapping` (role -> worker class) and `mapping` (role -> pool).
    """

    _read: tuple[Config, PPOConfig] | None = None
    """A configuration as it was given, and what was read from it."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Enum, type] = {}
        self.mapping: dict[Enum, str] = {}

    def add_actor_rollout_worker(self, config: Config) -> tuple[type, type]:
        """The policy, which trains and samples; with LoRA it is its own reference.

        Gives the worker's class and that of its group.
        """
        from paceline.single_controller.ray import RayWorkerGroup
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        # One of these, or actor and rollout apart if they are on other pools.
        roles = (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor, Role.Rollout)
        self._add(config, ActorRolloutRefWorker, *roles)
        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: Config) -> None:
        """The value model, if the estimator needs one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(config, TrainingWorker, Role.Critic)

    def add_ref_policy_worker(self, config: Config, ref_policy_cls: type | None = None) -> None:
        """The frozen reference, if a KL term needs it: of the actor's class unless another is given."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        self._add(config, ref_policy_cls or ActorRolloutRefWorker, Role.RefPolicy)

    def add_reward_model_worker(self, config: Config) -> None:
        """The model that scores, if the configuration wants one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(config, TrainingWorker, Role.RewardModel)

    def add_teacher_worker(self, config: Config) -> None:
        """The models that score each sampled token, if the configuration wants them."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.teacher_worker import TeacherWorker

        self._add(config, TeacherWorker, Role.Teacher)

    def _add(self, config: Config, worker: type, *roles: Enum) -> None:
        """Add those of the roles that the configuration has."""
        from paceline.trainer.ppo.placement import role_to_pool

        pools = role_to_pool(self._complete(config))
        for role in roles:
            if role.name in pools:
                self.role_worker_mapping[role] = worker
                self.mapping[role] = pools[role.name]

    def _complete(self, config: Config) -> PPOConfig:
        """`config` as dataclasses. All methods are given the same object, which is read once."""
        if self._read is None or self._read[0] is not config:
            self._read = config, load_config(config)
        return self._read[1]

    def init_resource_pool_mgr(self, config: Config) -> ResourcePoolManager:
        """The pools that the configuration asks for, with the roles that were added."""
        from paceline.trainer.ppo.placement import plan_pools
        from paceline.trainer.ppo.roles import ResourcePoolManager

        return ResourcePoolManager(resource_pool_spec=plan_pools(self._complete(config)), mapping=self.mapping)

    @classmethod
    def look_ahead(cls, config: PPOConfig) -> None:
        """Raise what is wrong with models, prompts and rewards, before Ray starts.

        Where `build_trainer` is another one, the data and rewards may be, too, and only models are looked at.
        """
        from paceline.trainer.preflight import preflight

        preflight(config, reads_data=cls.build_trainer is TaskRunner.build_trainer)

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        from paceline.single_controller.ray.heartbeat import start_actor_heartbeat

        log_process("driver")
        start_actor_heartbeat()
        import_external(config.actor_rollout_ref.model.external_lib)
        trainer = self.build_trainer(config)
        trainer.init_workers()
        trainer.fit()

    def build_trainer(self, config: Config, ray_worker_group_cls: type[RayWorkerGroup] | None = None) -> RayPPOTrainer:
        """The trainer with the roles, pools and rewards of the configuration; its workers are not started."""
        from paceline.data.tokenizer import load_tokenizer
        from paceline.single_controller.ray import RayWorkerGroup
        from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

        self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_ref_policy_worker(config)
        self.add_reward_model_worker(config)
        self.add_teacher_worker(config)

        complete = self._complete(config)
        model = complete.actor_rollout_ref.model
        tokenizer = load_tokenizer(str(model.tokenizer_path or model.path), trust_remote_code=model.trust_remote_code)
        return RayPPOTrainer(
            config=complete,
            tokenizer=tokenizer,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=ray_worker_group_cls or RayWorkerGroup,
            reward_fn=make_reward_fn(complete, tokenizer, num_examine=0),
            val_reward_fn=make_reward_fn(complete, tokenizer, num_examine=1, validation=True),
        )


def make_reward_fn(
    config: Config, tokenizer: PreTrainedTokenizerBase, num_examine: int, validation: bool = False
) -> RewardManager:
    """Rules by data_source, or the function that custom_reward_function names."""
    from paceline.rewards import make_reward_manager

    return make_reward_manager(load_config(config), tokenizer, num_examine, validation=validation)


def run_ppo(config: Config, task_runner_class: type | None = None) -> None:
    """Check `config`, then run it in Ray to its end: in the Ray that is running, or in one for this run alone.

    `config` is Hydra's, `OmegaConf.load(...)` of any subset of the keys, a dict or a PPOConfig. `task_runner_class` has
    a method `run(config)`, gets the complete DictConfig, and may be plain or already `ray.remote`. An error that
    paceline raises in there is raised here as itself.
    """
    try:
        cfg = complete_reading(say_what_became(read_config(config)))
        look_ahead(cfg, task_runner_class or TaskRunner)
    except ConfigError as error:
        shown_without_our_frames(error)
        raise error.with_traceback(None) from None

    from paceline.report.live import closing_text, live_view
    from paceline.trainer.plan import dry_run_text, plan_text, plan_warnings

    if cfg.trainer.dry_run:
        sys.stdout.write(dry_run_text(cfg))
        return
    for warning in plan_warnings(cfg):
        logger.warning("%s", warning)
    sys.stdout.write(plan_text(cfg))
    sys.stdout.flush()
    run_dir = run_dir_of(cfg.trainer)
    with running_ray(cfg) as session, live_view(run_dir, cfg.trainer.live_view), terminal_lines(run_dir / LOGS_FOLDER):
        run_with_restarts(task_runner_class or TaskRunner, session, with_device(cfg))
    if not cfg.trainer.val_only:
        sys.stdout.write(closing_text(run_dir))


def say_what_became(reading: Reading) -> Reading:
    """Tell what was done with keys of verl's: in a dry run all of it, also where problems follow, else in one line."""
    if reading.cfg.trainer.dry_run:
        sys.stdout.write(notes_text(reading.notes))
        sys.stdout.flush()
    elif reading.notes:
        logger.info("keys of verl's (trainer.dry_run=True says more): %s", notes_line(reading.notes))
    return reading


def look_ahead(cfg: PPOConfig, task_runner_class: type) -> None:
    """Raise what is wrong with models, prompts and rewards before Ray starts; of a runner of other making, nothing."""
    from paceline.trainer.preflight import crowded_cores

    if remark := crowded_cores(cfg):
        logger.warning("%s", remark)
    if isinstance(task_runner_class, type) and issubclass(task_runner_class, TaskRunner):
        task_runner_class.look_ahead(cfg)


@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train as Hydra's configuration says."""
    configure_logging()
    with errors_as_exit_codes():
        run_ppo(config)


def cli(hydra_main: Callable[[], None] = main) -> None:
    """The command line of a `@hydra.main` function: --help at once, and all bad overrides in one message."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(render_help("python -m paceline.trainer.main_ppo"))
        return
    own_errors = hydra_errors_as_ours(getattr(hydra_main, "__wrapped__", None))
    with one_command(), errors_as_exit_codes(), own_errors:
        sys.argv[1:] = check_overrides(arguments)
        hydra_main()


if __name__ == "__main__":
    cli()
