"""Ray around a run: started if none is running, and the run's own process watched, stopped and started again in it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
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
from paceline.config.secrets import masked, without_secrets
from paceline.errors import ConfigError, PacelineError, ResourceError, WorkerError
from paceline.log_file import LOG_FOLDER_VARIABLE
from paceline.report.environment import launch_variables
from paceline.trainer.constants_ppo import merged_runtime_env

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.5
"""How long Ray may take to bring a worker's last lines to this terminal; what comes later is lost at its shutdown."""
NODE_SECONDS = 300.0
"""How long a restart waits for nodes, if what is left of the cluster is too small."""
NODE_POLL_SECONDS = 2.0
OWN_RAY = {"num_workers_soft_limit": 0, "enable_metrics_collection": False}
"""For a Ray of this run alone: no process kept for tasks, as a run has none but the one that reads the last words of a
process that died on another node, and no metrics, which nothing reads without a dashboard. Each idle process takes 1 %
of a core, and a step waits for its slowest thread."""
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
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    owns_ray = not ray.is_initialized()
    environment = _start_ray(cfg) if owns_ray else _options_in_running_ray(cfg)
    try:
        with _sigterm_as_interrupt(), _ray_errors_as_ours():
            # 0 CPUs: the driver of the run waits most of the time, and must not take a device's place. On this node, if
            # it has room: the loss of another node then leaves the driver alone.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            yield {"num_cpus": 0, "scheduling_strategy": here, **environment}
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
    attempt, run = cfg, _run_to_end
    for restarts_left in reversed(range(cfg.trainer.max_restarts + 1)):
        try:
            run(task_runner_class, options, attempt)
            return
        except WorkerError as error:
            if not _may_pass(error):
                raise
            if restarts_left == 0:
                logger.error("the run ends: %s", _advice(cfg))
                raise
            logger.error("%s", error)
            attempt, run = _resuming(cfg), _run_when_it_fits
            logger.warning(
                "starting again from %s; %d more restarts (trainer.max_restarts=%d)",
                "the last checkpoint" if attempt is not cfg else "the beginning",
                restarts_left - 1, cfg.trainer.max_restarts,
            )  # fmt: skip


def _may_pass(error: WorkerError) -> bool:
    """Whether another attempt may end otherwise; what paceline raises on purpose in a worker would come again."""
    kind = getattr(errors, error.message.partition(":")[0], None)
    return not (isinstance(kind, type) and issubclass(kind, PacelineError))


def _has_checkpoint(cfg: PPOConfig) -> bool:
    return any((Path(str(cfg.trainer.default_local_dir)) / "checkpoints").glob("global_step_*"))


def _advice(cfg: PPOConfig) -> str:
    """What to do about a run that ended by a death."""
    by_itself = f"trainer.max_restarts={cfg.trainer.max_restarts + 3} lets it do so by itself"
    if _has_checkpoint(cfg):
        return f"with trainer.resume_mode=auto the same command goes on from its last checkpoint; {by_itself}"
    return f"it has no checkpoint, so the same command starts from the beginning; set trainer.save_freq; {by_itself}"


def _resuming(cfg: PPOConfig) -> PPOConfig:
    """The configuration of the next attempt: it goes on from the run's own checkpoints if there are any."""
    if not _has_checkpoint(cfg):
        return cfg
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, resume_mode="auto", resume_from_path=None))


def _run_when_it_fits(task_runner_class: Any, options: dict[str, Any], cfg: PPOConfig) -> None:
    """After a death: if a node went with it, the cluster is given time to put another in its place."""
    deadline = time.monotonic() + NODE_SECONDS
    told = False
    while True:
        try:
            return _run_to_end(task_runner_class, options, cfg)
        except ResourceError as error:
            if time.monotonic() > deadline:
                raise
            if not told:
                logger.warning("waiting up to %.0f s for nodes to come back: %s", NODE_SECONDS, error)
                told = True
            time.sleep(NODE_POLL_SECONDS)


def _run_to_end(task_runner_class: Any, options: dict[str, Any], cfg: PPOConfig) -> None:
    """Make the actor and wait for its `run`; whatever ends the wait early (Ctrl-C too) ends the actor as well."""
    import ray
    from ray.actor import ActorClass

    from paceline.single_controller.ray.heartbeat import forget_beats

    is_remote = isinstance(task_runner_class, ActorClass)
    actor_class = task_runner_class if is_remote else ray.remote(task_runner_class)
    if is_remote:  # its author chose its resources and its place
        options = {name: value for name, value in options.items() if name == "runtime_env"}
    stop_file = Path(str(cfg.trainer.default_local_dir)) / STOP_FILE
    if not cfg.trainer.val_only:  # only a look: the folder may belong to a run that is going on
        stop_file.unlink(missing_ok=True)  # meant for an earlier run
    runner = actor_class.options(**options).remote()
    try:
        running = runner.run.remote(to_dictconfig(cfg))
        with _ray_errors_as_ours():
            try:
                ray.get(running)
            except KeyboardInterrupt:
                if not cfg.trainer.save_on_interrupt or cfg.trainer.val_only:
                    raise
                stop_file.parent.mkdir(parents=True, exist_ok=True)
                stop_file.touch()  # before the words: a terminal that is not read would hold them up
                logger.warning("ending after this step, with a checkpoint; Ctrl-C again to stop at once")
                ray.get(running)
                raise
    except BaseException:
        ray.kill(runner)
        _remove_reservations(runner._actor_id.hex())
        raise
    finally:
        forget_beats(runner._actor_id.hex())


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

    from paceline.single_controller.ray.death import explain_death, place_of_actor
    from paceline.single_controller.ray.heartbeat import read_beat

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, PacelineError):
            raise error.cause from None
        raise
    except RayError as error:  # the process that drove the run died, or its node
        actor_id = getattr(error, "actor_id", None)
        place, beat = (place_of_actor(actor_id), read_beat(actor_id)) if actor_id else (None, None)
        raise WorkerError("task_runner", 0, "run", *explain_death(error, place, beat)) from None


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
    """ray.init with ray_kwargs.ray_init. Gives the options of the TaskRunner: none, the job has the environment.

    Left alone, Ray joins whatever cluster was started on this machine, perhaps by someone else: we join one only where
    the configuration or the environment names it.
    """
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
    try:
        ray_init = {
            "include_dashboard": False,
            "logging_level": logging.WARNING,
            "address": os.environ.get("RAY_ADDRESS", "local"),
            **ray_init,
        }
        if ray_init["address"] == "local" and not ray_init["include_dashboard"]:
            ray_init["_system_config"] = OWN_RAY | dict(ray_init.get("_system_config") or {})
        ray.init(**ray_init, runtime_env=runtime_env)
    except (ConnectionError, ValueError) as error:  # no cluster at that address, or keys that only a new one takes
        # `ray_init` has no runtime_env: any variable in it may be a secret.
        shown = without_secrets({name: ray_init[name] for name in cfg.ray_kwargs.ray_init if name in ray_init})
        given = ", ".join(f"{name}={value}" for name, value in shown.items())
        raise ConfigError(
            f"Ray can't be started with ray_kwargs.ray_init of {given or 'nothing'}: {masked('', str(error))}"
        ) from error
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
