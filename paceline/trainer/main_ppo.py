"""The entry of a run: checks the configuration, starts Ray, and runs a TaskRunner to its end.

    python -m paceline.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=model

or, from Python, `run_ppo(OmegaConf.load("my.yaml"))`. Ray, torch and transformers are imported where they are needed:
a bad configuration and --help answer at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf

from paceline.config import PPOConfig
from paceline.config.checks import KnownNames, validate
from paceline.config.describe import render_help
from paceline.config.keys import nearest
from paceline.config.load import Config, load_config, read_config, to_dictconfig
from paceline.config.overrides import check_overrides
from paceline.errors import ConfigError, PacelineError, WorkerError
from paceline.trainer.constants_ppo import merged_runtime_env
from paceline.trainer.device import detect_device

if TYPE_CHECKING:
    from paceline.rewards import RewardManager
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
    from paceline.trainer.ppo.roles import ResourcePoolManager

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.5
"""How long Ray may take to bring a worker's last lines to this terminal; what comes later is lost at its shutdown."""

AnyConfig = TypeVar("AnyConfig", DictConfig, PPOConfig)


class TaskRunner:
    """Drives a run from inside Ray. Subclass it to change a part, and give the subclass to `run_ppo`.

    The `add_*_worker` methods fill `role_worker_mapping` (role -> worker class) and `mapping` (role -> pool).
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Enum, type] = {}
        self.mapping: dict[Enum, str] = {}

    def add_actor_rollout_worker(self, config: Config) -> None:
        """The policy, which trains and samples."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        self._add(Role.ActorRollout, ActorRolloutRefWorker, config)

    def add_critic_worker(self, config: Config) -> None:
        """The value model, if the estimator needs one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(Role.Critic, TrainingWorker, config)

    def add_ref_policy_worker(self, config: Config) -> None:
        """The frozen reference, if a KL term needs it."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import ActorRolloutRefWorker

        self._add(Role.RefPolicy, ActorRolloutRefWorker, config)

    def add_reward_model_worker(self, config: Config) -> None:
        """The model that scores, if the configuration wants one."""
        from paceline.trainer.ppo.roles import Role
        from paceline.workers.engine_workers import TrainingWorker

        self._add(Role.RewardModel, TrainingWorker, config)

    def _add(self, role: Enum, worker: type, config: Config) -> None:
        """Add a role if the configuration has it."""
        from paceline.trainer.ppo.placement import role_to_pool

        pool = role_to_pool(load_config(config)).get(role.name)
        if pool is not None:
            self.role_worker_mapping[role] = worker
            self.mapping[role] = pool

    def init_resource_pool_mgr(self, config: Config) -> ResourcePoolManager:
        """The pools that the configuration asks for, with the roles that were added."""
        from paceline.trainer.ppo.placement import plan_pools
        from paceline.trainer.ppo.roles import ResourcePoolManager

        return ResourcePoolManager(resource_pool_spec=plan_pools(load_config(config)), mapping=self.mapping)

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        configure_logging()
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
            val_reward_fn=make_reward_fn(config, tokenizer, num_examine=1),
        )


def make_reward_fn(config: Config, tokenizer: Any, num_examine: int) -> RewardManager:
    """Rules by data_source, or the function that custom_reward_function names."""
    from paceline.rewards import make_reward_manager

    return make_reward_manager(load_config(config), tokenizer, num_examine)


def run_ppo(config: Config, task_runner_class: type | None = None) -> None:
    """Check `config`, then run it in Ray to its end: in the Ray that is running, or in one for this run alone.

    `config` is Hydra's, `OmegaConf.load(...)` of any subset of the keys, a dict or a PPOConfig. `task_runner_class` has
    a method `run(config)`, gets the complete DictConfig, and may be plain or already `ray.remote`. An error that
    paceline raises in there is raised here as itself.
    """
    cfg = complete_config(config)
    if cfg.trainer.dry_run:
        sys.stdout.write(dry_run_text(cfg))
        return
    _warn_of_idle_devices(cfg)

    with running_ray(cfg) as options:
        _run_to_end(task_runner_class or TaskRunner, options, to_dictconfig(cfg))


@contextmanager
def running_ray(cfg: PPOConfig) -> Iterator[dict[str, Any]]:
    """The Ray that is running, or one for this block alone; gives the options of the actor or task that drives the run.

    Errors of paceline that come out of Ray inside the block are raised as themselves. Ray's own timeline is written
    when the block ends well and the configuration asks for it.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    owns_ray = not ray.is_initialized()
    environment = _start_ray(cfg) if owns_ray else _options_in_running_ray(cfg)
    try:
        # 0 CPUs: the driver of the run waits most of the time, and must not take a device's place on a small machine.
        yield {"num_cpus": 0, **environment}
        if cfg.ray_kwargs.timeline_json_file:
            Path(cfg.ray_kwargs.timeline_json_file).parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(filename=cfg.ray_kwargs.timeline_json_file)
    except RayTaskError as error:
        if isinstance(error.cause, PacelineError):
            raise error.cause from None
        raise
    except RayError as error:  # the process that drove the run died, or its node
        raise WorkerError("task_runner", 0, "run", str(error)) from None
    finally:
        if owns_ray:
            time.sleep(LOG_SECONDS)
            ray.shutdown()


def _run_to_end(task_runner_class: Any, options: dict[str, Any], config: DictConfig) -> None:
    """Make the actor and wait for its `run`; whatever ends the wait early (Ctrl-C too) ends the actor as well."""
    import ray
    from ray.actor import ActorClass

    is_remote = isinstance(task_runner_class, ActorClass)
    actor_class = task_runner_class if is_remote else ray.remote(task_runner_class)
    if is_remote:  # its author chose its resources
        options = {name: value for name, value in options.items() if name != "num_cpus"}
    runner = actor_class.options(**options).remote()
    try:
        ray.get(runner.run.remote(config))
    except BaseException:
        ray.kill(runner)
        raise


def _start_ray(cfg: PPOConfig) -> dict[str, Any]:
    """ray.init with ray_kwargs.ray_init. Gives the options of the TaskRunner: none, the job has the environment."""
    import ray

    ray_init = dict(cfg.ray_kwargs.ray_init)
    known = [name for name in inspect.signature(ray.init).parameters if name != "kwargs"]
    problems = []
    for name in ray_init:
        if name not in known and not name.startswith("_"):
            close = nearest(name, known)
            hint = f"; did you mean {close}?" if close else "."
            problems.append(f"ray_kwargs.ray_init.{name} is no argument of ray.init{hint}")
    if problems:
        raise ConfigError(problems)
    runtime_env = merged_runtime_env(ray_init.pop("runtime_env", None), transfer_queue=cfg.transfer_queue.enable)
    ray.init(**{"include_dashboard": False, **ray_init, "runtime_env": runtime_env})
    return {}


def _options_in_running_ray(cfg: PPOConfig) -> dict[str, Any]:
    """The options of the TaskRunner in a Ray that someone else started: only variables can still be set."""
    ray_init = dict(cfg.ray_kwargs.ray_init)
    runtime_env = merged_runtime_env(ray_init.pop("runtime_env", None), transfer_queue=cfg.transfer_queue.enable)
    variables = runtime_env.pop("env_vars")
    unused = [*ray_init, *(f"runtime_env.{name}" for name in runtime_env)]
    if unused:
        logger.warning("Ray is running already, so these keys of ray_kwargs.ray_init are not used: %s", unused)
    return {"runtime_env": {"env_vars": variables}}


def complete_config(config: Config) -> PPOConfig:
    """`config` over the defaults, checked, with the device and the run's folder filled in."""
    cfg, _ = read_config(config)
    device = cfg.trainer.device or detect_device()
    cfg = validate(config, device=device, known=known_names(cfg))
    trainer = cfg.trainer
    # Absolute here, because the TaskRunner may run in another folder.
    run_dir = trainer.default_local_dir or os.path.abspath(
        Path("runs") / trainer.project_name / trainer.experiment_name
    )
    return dataclasses.replace(cfg, trainer=dataclasses.replace(trainer, device=device, default_local_dir=run_dir))


def known_names(cfg: PPOConfig) -> KnownNames:
    """The built-in names, and those of `cfg` that were registered in this process.

    Registering imports the registry, so a registry that nobody imported has nothing to add and is left alone.
    """
    known = KnownNames()
    actor = cfg.actor_rollout_ref.actor
    estimator = cfg.algorithm.adv_estimator
    advantages = "paceline.algorithms.advantages"
    if _is_registered(advantages, "get_adv_estimator", estimator) and estimator not in known.adv_estimators:
        registry = sys.modules[advantages]
        needs_critic, needs_groups = registry.needs_critic(estimator), registry.needs_groups(estimator)
        known = dataclasses.replace(
            known,
            adv_estimators=(*known.adv_estimators, estimator),
            critic_estimators=(*known.critic_estimators, *([estimator] if needs_critic else [])),
            group_estimators=(*known.group_estimators, *([estimator] if needs_groups else [])),
        )
    if _is_registered("paceline.algorithms.policy_loss", "get_policy_loss", actor.policy_loss.loss_mode):
        known = dataclasses.replace(known, policy_losses=(*known.policy_losses, actor.policy_loss.loss_mode))
    for strategy in (actor.strategy, cfg.critic.strategy):
        if _is_registered("paceline.engine.registry", "get_engine", strategy):
            known = dataclasses.replace(known, strategies=(*known.strategies, strategy))
    if _is_registered("paceline.rollout.registry", "get_rollout", cfg.actor_rollout_ref.rollout.name):
        known = dataclasses.replace(known, rollouts=(*known.rollouts, cfg.actor_rollout_ref.rollout.name))
    return known


def _is_registered(module: str, getter: str, name: str) -> bool:
    if module not in sys.modules:
        return False
    try:
        getattr(sys.modules[module], getter)(name)
    except ConfigError:
        return False
    return True


def auto_set_device(config: AnyConfig) -> AnyConfig:
    """Fill trainer.device where it is null: in a DictConfig in place, of a PPOConfig in the copy that is returned."""
    if isinstance(config, PPOConfig):
        if config.trainer.device is not None:
            return config
        return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=detect_device()))
    if OmegaConf.select(config, "trainer.device") is None:
        OmegaConf.update(config, "trainer.device", detect_device(), force_add=True)
    return config


def dry_run_text(cfg: PPOConfig) -> str:
    """What a run would do with its batches and devices."""
    from paceline.trainer.ppo.placement import batch_table, placement_picture

    return f"{batch_table(cfg)}\n\n{placement_picture(cfg)}\n"


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


def configure_logging() -> None:
    """One readable line per record, unless the program has set up logging itself."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """For a command line: our errors as their message alone; exit code 2 for a bad configuration, 1 for the rest."""
    try:
        yield
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        sys.exit(130)


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
        sys.stdout.write(render_help("paceline.trainer.main_ppo"))
        return
    with errors_as_exit_codes():
        sys.argv[1:] = check_overrides(arguments)
    hydra_main()


if __name__ == "__main__":
    cli()
