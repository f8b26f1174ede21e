"""The entry of a run: checks the configuration, starts Ray, and runs a TaskRunner to its end.

    python -m paceline.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=model

or, from Python, `run_ppo(OmegaConf.load("my.yaml"))`. Ray, torch and transformers are imported where they are needed:
a bad configuration and --help answer at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from paceline.config import PPOConfig
from paceline.config.checks import all_problems, check_surroundings, known_names, unused_settings
from paceline.config.describe import render_help
from paceline.config.load import Config, load_config, read_config
from paceline.config.overrides import check_overrides
from paceline.errors import ConfigError, PacelineError
from paceline.external import import_external
from paceline.log_file import configure_logging, log_process, terminal_lines
from paceline.run_folder import LOGS_FOLDER, default_run_dir
from paceline.trainer.device import detect_device, joins_cluster
from paceline.trainer.launch import Terminated, run_with_restarts, running_ray

if TYPE_CHECKING:
    from paceline.rewards import RewardManager
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
    from paceline.trainer.ppo.roles import ResourcePoolManager

logger = logging.getLogger(__name__)

AnyConfig = TypeVar("AnyConfig", DictConfig, PPOConfig)


class TaskRunner:
    """Drives a run from inside Ray. Subclass it to change a part, and give the subclass to `run_ppo`.

    The `add_*_worker` methods fill `role_worker_mapping` (role -> worker class) and `mapping` (role -> pool).
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Enum, type] = {}
        self.mapping: dict[Enum, str] = {}

    def add_actor_rollout_worker(self, config: Config) -> None:
        """The policy, which trains and samples; with LoRA it is its own reference."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        # One of these, or actor and rollout apart if they are on other pools.
        roles = (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor, Role.Rollout)
        self._add(config, ActorRolloutRefWorker, *roles)

    def add_critic_worker(self, config: Config) -> None:
        """The value model, if the estimator needs one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(config, TrainingWorker, Role.Critic)

    def add_ref_policy_worker(self, config: Config) -> None:
        """The frozen reference, if a KL term needs it."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        self._add(config, ActorRolloutRefWorker, Role.RefPolicy)

    def add_reward_model_worker(self, config: Config) -> None:
        """The model that scores, if the configuration wants one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(config, TrainingWorker, Role.RewardModel)

    def _add(self, config: Config, worker: type, *roles: Enum) -> None:
        """Add those of the roles that the configuration has."""
        from paceline.trainer.ppo.placement import role_to_pool

        pools = role_to_pool(load_config(config))
        for role in roles:
            if role.name in pools:
                self.role_worker_mapping[role] = worker
                self.mapping[role] = pools[role.name]

    def init_resource_pool_mgr(self, config: Config) -> ResourcePoolManager:
        """The pools that the configuration asks for, with the roles that were added."""
        from paceline.trainer.ppo.placement import plan_pools
        from paceline.trainer.ppo.roles import ResourcePoolManager

        return ResourcePoolManager(resource_pool_spec=plan_pools(load_config(config)), mapping=self.mapping)

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        from paceline.single_controller.ray.heartbeat import start_actor_heartbeat

        log_process("driver")
        start_actor_heartbeat()
        import_external(load_config(config).actor_rollout_ref.model.external_lib)
        trainer = self.build_trainer(config)
        trainer.init_workers()
        trainer.fit()

    def build_trainer(self, config: Config, ray_worker_group_cls: Any = None) -> RayPPOTrainer:
        """The trainer with the roles, pools and rewards of the configuration; its workers are not started."""
        from paceline.data.tokenizer import load_tokenizer
        from paceline.single_controller.ray import RayWorkerGroup
        from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

        self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_ref_policy_worker(config)
        self.add_reward_model_worker(config)

        model = load_config(config).actor_rollout_ref.model
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        return RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=ray_worker_group_cls or RayWorkerGroup,
            reward_fn=make_reward_fn(config, tokenizer, num_examine=0),
            val_reward_fn=make_reward_fn(config, tokenizer, num_examine=1, validation=True),
        )


def make_reward_fn(config: Config, tokenizer: Any, num_examine: int, validation: bool = False) -> RewardManager:
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
        cfg = complete_config(config)
        look_ahead(cfg, task_runner_class or TaskRunner)
    except ConfigError as error:
        shown_without_our_frames(error)
        raise error.with_traceback(None) from None
    if cfg.trainer.dry_run:
        sys.stdout.write(dry_run_text(cfg))
        return
    _warn_of_idle_devices(cfg)
    _warn_of_memory(cfg)
    for note in unused_settings(cfg, known_names(cfg)):
        logger.warning("%s", note)
    sys.stdout.write(plan_text(cfg))
    sys.stdout.flush()

    from paceline.report.closing import closing_text
    from paceline.report.live import live_view

    run_dir = Path(str(cfg.trainer.default_local_dir))
    with running_ray(cfg) as session, live_view(run_dir, cfg.trainer.live_view), terminal_lines(run_dir / LOGS_FOLDER):
        run_with_restarts(task_runner_class or TaskRunner, session, with_device(cfg))
    if not cfg.trainer.val_only:
        sys.stdout.write(closing_text(run_dir))


def look_ahead(cfg: PPOConfig, task_runner_class: type) -> None:
    """Raise what is wrong with models, prompts and rewards before Ray starts; of a runner of other making, nothing."""
    from paceline.trainer.preflight import crowded_cores, preflight

    if remark := crowded_cores(cfg):
        logger.warning("%s", remark)
    if isinstance(task_runner_class, type) and issubclass(task_runner_class, TaskRunner):
        preflight(cfg, reads_data=task_runner_class.build_trainer is TaskRunner.build_trainer)


def shown_without_our_frames(error: ConfigError) -> None:
    """If nobody catches it, Python shows `error` with the lines of the user's own program and its message, no more."""
    if sys.excepthook is not sys.__excepthook__:  # a debugger or a notebook shows errors in its own way
        return

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            sys.__excepthook__(kind, raised, trace)
            return
        package = os.path.dirname(os.path.dirname(__file__))
        frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(package)]
        sys.stderr.write("".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]))
        sys.stderr.write(f"{kind.__name__}: {raised}\n")

    sys.excepthook = show


def complete_config(config: Config) -> PPOConfig:
    """`config` over the defaults, checked, with the device and the run's folder filled in."""
    cfg, unread = read_config(config)
    problems: list[str] = []
    try:
        import_external(cfg.actor_rollout_ref.model.external_lib)
    except ConfigError as error:
        problems = error.problems
    problems += all_problems(cfg, unread, known=known_names(cfg))
    if problems:
        raise ConfigError(problems)
    trainer = cfg.trainer
    # Asked last, because it loads torch: a bad configuration is answered without it.
    device = trainer.device or (None if joins_cluster(cfg) else detect_device())
    # Absolute here, because the TaskRunner may run in another folder.
    run_dir = trainer.default_local_dir or os.path.abspath(
        default_run_dir(trainer.project_name, trainer.experiment_name)
    )
    filled = dataclasses.replace(trainer, device=device, default_local_dir=run_dir)
    return _checked(dataclasses.replace(cfg, trainer=filled))


def with_device(cfg: PPOConfig) -> PPOConfig:
    """`cfg` with the device of the cluster that was joined, checked again, if it was not known before."""
    if cfg.trainer.device is not None:
        return cfg
    return _checked(auto_set_device(cfg))


def _checked(cfg: PPOConfig) -> PPOConfig:
    """`cfg`, whose device or folder was filled in after everything else was checked."""
    if problems := check_surroundings(cfg, known=known_names(cfg)):
        raise ConfigError(problems)
    return cfg


def auto_set_device(config: AnyConfig) -> AnyConfig:
    """Fill trainer.device where it is null: in a DictConfig in place, of a PPOConfig in the copy that is returned."""
    if isinstance(config, PPOConfig):
        if config.trainer.device is not None:
            return config
        return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=detect_device()))
    if OmegaConf.select(config, "trainer.device") is None:
        OmegaConf.update(config, "trainer.device", detect_device(), force_add=True)
    return config


def plan_text(cfg: PPOConfig) -> str:
    """What the batch sizes come to, and which roles go where."""
    from paceline.trainer.ppo.placement import batch_table, placement_picture

    return f"{batch_table(cfg)}\n\n{placement_picture(cfg)}\n\n"


def dry_run_text(cfg: PPOConfig) -> str:
    """The plan, and what it needs of memory."""
    from paceline.trainer.ppo.memory import available_memory, memory_table, plan_memory

    memory = memory_table(plan_memory(cfg), available_memory(cfg.trainer.device or detect_device()))
    return f"{plan_text(cfg)}{memory}\n"


def _warn_of_idle_devices(cfg: PPOConfig) -> None:
    from paceline.trainer.ppo.placement import idle_devices

    idle = idle_devices(cfg)
    if idle:
        logger.warning(
            "algorithm.adv_estimator=%s has no critic, so the %d devices of critic_pool are not used; "
            "set trainer.placement.name=colocated to use them.",
            cfg.algorithm.adv_estimator,
            idle,
        )


def _warn_of_memory(cfg: PPOConfig) -> None:
    from paceline.trainer.ppo.memory import available_memory, memory_warning, plan_memory

    warning = memory_warning(plan_memory(cfg), available_memory(cfg.trainer.device or detect_device()))
    if warning:
        logger.warning("%s", warning)


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """For a command line: our errors as their message alone; exit code 2 for a bad configuration, 1 for the rest."""
    try:
        yield
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        sys.stderr.write(f"stopped by {'SIGTERM' if terminated else 'Ctrl-C'}\n")
        sys.exit(143 if terminated else 130)


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
    with errors_as_exit_codes(), _hydra_errors_as_ours(getattr(hydra_main, "__wrapped__", None)):
        sys.argv[1:] = check_overrides(arguments)
        hydra_main()


@contextmanager
def _hydra_errors_as_ours(task: Callable[..., Any] | None) -> Iterator[None]:
    """What Hydra says of a yaml or an override as a ConfigError; by itself it shows a traceback for a broken yaml.

    What comes out of `task`, the function that Hydra calls, is left as it is.
    """
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        cause = f" {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        raise ConfigError(f"{error}{cause}") from error
    except OSError as error:  # of a folder that Hydra was told to make
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if task is None or any(frame.f_code is task.__code__ for frame in frames):
            raise
        raise ConfigError(f"hydra.run.dir can't be made: {error}. Leave it out, or set another folder.") from error
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


if __name__ == "__main__":
    cli()
