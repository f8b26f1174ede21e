"""Ray around a run: started if none is running, and the run's own process watched, stopped and started again in it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paceline import errors
from paceline.config import PPOConfig
from paceline.config.keys import nearest
from paceline.config.load import to_dictconfig
from paceline.errors import ConfigError, PacelineError, WorkerError
from paceline.log_file import LOG_FOLDER_VARIABLE
from paceline.report.environment import launch_variables
from paceline.trainer.constants_ppo import merged_runtime_env

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.5
"""How long Ray may take to bring a worker's last lines to this terminal; what comes later is lost at its shutdown."""
STOP_FILE = "stop"
"""A file of this name in the run's folder asks the run to end after its step, with a checkpoint."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, which is treated as Ctrl-C is."""


@contextmanager
def running_ray(cfg: PPOConfig) -> Iterator[dict[str, Any]]:
    """The Ray that is running, or one for this block alone; gives the options of the actor or task that drives the run.

    Errors of paceline that come out of Ray inside the block are raised as themselves. Ray's own timeline is written
    when the block ends well and the configuration asks for it.
    """
    import ray

    owns_ray = not ray.is_initialized()
    environment = _start_ray(cfg) if owns_ray else _options_in_running_ray(cfg)
    try:
        with _sigterm_as_interrupt(), _ray_errors_as_ours():
            # 0 CPUs: the driver of the run waits most of the time, and must not take a device's place.
            yield {"num_cpus": 0, **environment}
        if cfg.ray_kwargs.timeline_json_file:
            Path(cfg.ray_kwargs.timeline_json_file).parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(filename=cfg.ray_kwargs.timeline_json_file)
    finally:
        if owns_ray:
            time.sleep(LOG_SECONDS)
            ray.shutdown()


def run_with_restarts(task_runner_class: Any, options: dict[str, Any], cfg: PPOConfig) -> None:
    """Run to the end. The death of any process is survived `trainer.max_restarts` times, from the last checkpoint.

    All processes of the run end with its TaskRunner, so one way of starting again serves every kind of death.
    """
    attempt = cfg
    for restarts_left in reversed(range(cfg.trainer.max_restarts + 1)):
        try:
            with _ray_errors_as_ours():
                _run_to_end(task_runner_class, options, attempt)
                return
        except WorkerError as error:
            if restarts_left == 0 or not _may_pass(error):
                raise
            logger.error("%s", error)
            attempt = _resuming(cfg)
            logger.warning(
                "starting again from %s; %d more restarts (trainer.max_restarts=%d)",
                "the last checkpoint" if attempt is not cfg else "the beginning",
                restarts_left - 1, cfg.trainer.max_restarts,
            )  # fmt: skip


def _may_pass(error: WorkerError) -> bool:
    """Whether another attempt may end otherwise; what paceline raises on purpose in a worker would come again."""
    kind = getattr(errors, error.message.partition(":")[0], None)
    return not (isinstance(kind, type) and issubclass(kind, PacelineError))


def _resuming(cfg: PPOConfig) -> PPOConfig:
    """The configuration of the next attempt: it goes on from the run's own checkpoints if there are any."""
    if not any((Path(str(cfg.trainer.default_local_dir)) / "checkpoints").glob("global_step_*")):
        return cfg
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, resume_mode="auto", resume_from_path=None))


def _run_to_end(task_runner_class: Any, options: dict[str, Any], cfg: PPOConfig) -> None:
    """Make the actor and wait for its `run`; whatever ends the wait early (Ctrl-C too) ends the actor as well."""
    import ray
    from ray.actor import ActorClass

    is_remote = isinstance(task_runner_class, ActorClass)
    actor_class = task_runner_class if is_remote else ray.remote(task_runner_class)
    if is_remote:  # its author chose its resources
        options = {name: value for name, value in options.items() if name != "num_cpus"}
    stop_file = Path(str(cfg.trainer.default_local_dir)) / STOP_FILE
    stop_file.unlink(missing_ok=True)  # meant for an earlier run
    runner = actor_class.options(**options).remote()
    try:
        running = runner.run.remote(to_dictconfig(cfg))
        try:
            ray.get(running)
        except KeyboardInterrupt:
            if not cfg.trainer.save_on_interrupt:
                raise
            logger.warning("ending after this step, with a checkpoint; Ctrl-C again to stop at once")
            stop_file.parent.mkdir(parents=True, exist_ok=True)
            stop_file.touch()
            ray.get(running)
            raise
    except BaseException:
        ray.kill(runner)
        _remove_reservations(runner._actor_id.hex())
        raise


def _remove_reservations(actor_id: str) -> None:
    """Ray keeps the placement groups of an actor that died until the whole job ends."""
    import ray
    from ray.util.placement_group import placement_group_table, remove_placement_group

    for entry in placement_group_table().values():
        if entry["name"].endswith(actor_id) and entry["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(entry["name"]))


@contextmanager
def _ray_errors_as_ours() -> Iterator[None]:
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, PacelineError):
            raise error.cause from None
        raise
    except RayError as error:  # the process that drove the run died, or its node
        raise WorkerError("task_runner", 0, "run", str(error)) from None


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does. Only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    was_sigterm = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_sigterm
        was_sigterm = True
        raise KeyboardInterrupt  # the only kind that comes out of a waiting ray.get as it is

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if was_sigterm:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


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
    runtime_env = _runtime_env(cfg, ray_init.pop("runtime_env", None))
    ray.init(**{"include_dashboard": False, **ray_init, "runtime_env": runtime_env})
    return {}


def _runtime_env(cfg: PPOConfig, user: dict[str, Any] | None) -> dict[str, Any]:
    """Ours and the user's, with what the processes of this run tell of it."""
    run = {**launch_variables(), LOG_FOLDER_VARIABLE: str(Path(str(cfg.trainer.default_local_dir)) / "logs")}
    return merged_runtime_env(user, transfer_queue=cfg.transfer_queue.enable, run=run)


def _options_in_running_ray(cfg: PPOConfig) -> dict[str, Any]:
    """The options of the TaskRunner in a Ray that someone else started: only variables can still be set."""
    ray_init = dict(cfg.ray_kwargs.ray_init)
    runtime_env = _runtime_env(cfg, ray_init.pop("runtime_env", None))
    variables = runtime_env.pop("env_vars")
    unused = [*ray_init, *(f"runtime_env.{name}" for name in runtime_env)]
    if unused:
        logger.warning("Ray is running already, so these keys of ray_kwargs.ray_init are not used: %s", unused)
    return {"runtime_env": {"env_vars": variables}}
