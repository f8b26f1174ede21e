"""The Ray that a run is in: one that was running, or one of the run's own. No call of it here waits without an end.

What asks Ray's records (its gcs_server) or a raylet may never be answered: such calls run in threads that are given up
after some seconds, and what is left of a Ray of the run's own is then killed, by process id.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

import psutil

from paceline.config import AnyRunConfig
from paceline.config.derived import run_dir_of
from paceline.config.secrets import without_secrets
from paceline.errors import ConfigError, WorkerError
from paceline.log_file import LOG_FOLDER_VARIABLE
from paceline.report.environment import launch_variables
from paceline.run_folder import LOGS_FOLDER
from paceline.text import nearest
from paceline.trainer.constants_ppo import merged_runtime_env, without_those_of_the_job
from paceline.trainer.same_command import start_again_or_end

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ANSWER_SECONDS = 15.0
"""How long Ray may take to answer a question about its records."""
LOG_SECONDS = 0.5
"""How long Ray may take to bring a worker's last lines to this terminal; what comes later is lost at its shutdown."""
START_SECONDS = 180.0
"""How long a Ray of the run's own may take to start, on a machine that is busy; Ray itself gives a raylet 30 s."""
STOPPED_SECONDS = 20.0
"""How long its gcs_server may be stopped meanwhile. After a minute without it Ray ends this whole process."""
REFUSAL_SECONDS = 5.0
SHUTDOWN_SECONDS = 10.0
GRACE_SECONDS = 2.0
"""How long processes that were asked to end may take to do so."""
VITAL = ("gcs_server", "raylet")
"""Ray's own processes without which nothing goes on."""
OWN_RAY = {"num_workers_soft_limit": 0, "enable_metrics_collection": False}
"""For a Ray of this run alone: no process kept for tasks, as a run has none but the one that reads the last words of a
process that died on another node, and no metrics, which nothing reads without a dashboard. Each idle process takes 1 %
of a core, and a step waits for its slowest thread."""


def within(seconds: float, question: Callable[[], Answer]) -> Answer | None:
    """The answer, or None if it does not come in time; the thread that asks is then given up."""
    answers: list[Answer] = []
    problems: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=ask, name="question to Ray", daemon=True)
    thread.start()
    thread.join(seconds)
    if problems:
        raise problems[0]
    return answers[0] if answers else None


class RaySession:
    """Ray while a run is in it.

    `is_own`: the run started all of it, and it goes with the run; after a death a new one takes its place. Otherwise
    someone else's Ray is used, which is left as it was.
    """

    def __init__(self, cfg: AnyRunConfig) -> None:
        import ray

        self._cfg = cfg
        self._joins = not ray.is_initialized()
        self._is_open = False
        self._environment = {} if self._joins else _options_in_running_ray(cfg)
        self.is_own = False
        self.is_lost = False
        """Ray itself does not answer any more."""
        self._stopped: dict[int, float] = {}
        self.open()

    def open(self) -> None:
        """Start or join Ray, unless that was done."""
        if self._joins and not self._is_open:
            self.is_own = start_ray(self._cfg)
        self._is_open, self.is_lost = True, False

    def options(self) -> dict[str, object]:
        """The options of the actor or task that drives the run.

        0 CPUs: it waits most of the time, and must not take a device's place. On this node: the loss of another one
        then leaves it alone, and what it prints and writes is where the command was typed.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_cpus": 0, "scheduling_strategy": here, **self._environment}

    def problem(self, limit_seconds: float) -> str | None:
        """Which of Ray's own processes has ended, or is stopped for too long, if this process started them."""
        from paceline.private_apis.ray_private import started_processes

        processes = started_processes()
        for name in VITAL:
            for process in processes.get(name, ()):
                if process.poll() is not None:
                    return f"Ray's own process {name} (pid {process.pid}) ended with code {process.returncode}."
                if not _is_stopped(process.pid):
                    self._stopped.pop(process.pid, None)
                    continue
                seconds = time.monotonic() - self._stopped.setdefault(process.pid, time.monotonic())
                if seconds > limit_seconds:
                    return (
                        f"Ray's own process {name} (pid {process.pid}) was stopped {seconds:.0f} s ago. The limit is "
                        f"heartbeat_timeout_seconds={limit_seconds:g}."
                    )
        return None

    def close(self) -> None:
        """End Ray, or leave it; a second time does nothing. What does not end is killed, if the run started it."""
        if not self._joins or not self._is_open:
            return
        self._is_open = False
        if not self.is_lost:
            time.sleep(LOG_SECONDS)
        stop_ray(kill=self.is_own)


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def stop_ray(*, kill: bool) -> None:
    """`ray.shutdown`, which waits for processes that may be stopped or gone; with `kill` those that are left end."""
    import ray

    from paceline.private_apis.ray_private import cancel_shutdown_at_exit, session_folder

    folder = session_folder()
    ours = session_processes(folder) if kill and folder is not None else []

    def shut_down() -> None:
        with suppress(Exception):  # of a Ray that is gone
            ray.shutdown()

    thread = threading.Thread(target=shut_down, name="ray.shutdown", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_SECONDS)
    if not thread.is_alive():
        psutil.wait_procs(ours, timeout=GRACE_SECONDS)
    kill_processes(ours)
    thread.join(SHUTDOWN_SECONDS)
    if thread.is_alive():
        logger.warning("Ray's shutdown does not end; it is left alone")
        cancel_shutdown_at_exit()  # it would wait again


def session_processes(session_folder: str) -> list[psutil.Process]:
    """All processes of a Ray that this process started: its descendants, and workers whose raylet is gone already.

    A worker is known by its standard output, a file in the folder of the session. No other Ray has that folder.
    """
    found = {process.pid: process for process in psutil.Process().children(recursive=True) if _is_rays(process)}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{session_folder}/logs/worker-"):
                found |= {child.pid: child for child in [process, *process.children(recursive=True)]}
    return list(found.values())


def _is_rays(process: psutil.Process) -> bool:
    """Whether a descendant belongs to Ray: this program may have other children."""
    from paceline.private_apis.ray_private import started_processes

    with suppress(psutil.Error):
        roots = {root.pid for processes in started_processes().values() for root in processes}
        return process.pid in roots or any(parent.pid in roots for parent in process.parents())
    return False


def kill_processes(processes: Collection[psutil.Process]) -> None:
    """End these with SIGKILL; psutil sees to it that a process id that was given to another is left alone."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_SECONDS)


def start_ray(cfg: AnyRunConfig) -> bool:
    """ray.init with ray_kwargs.ray_init. Gives whether the run has a Ray of its own now.

    Left alone, Ray joins whatever cluster was started on this machine, perhaps by someone else: we join one only where
    the configuration or the environment names it.
    """
    import ray
    from ray.exceptions import AuthenticationError

    ray_init = dict(cfg.ray_kwargs.ray_init)
    known = [name for name in inspect.signature(ray.init).parameters if name != "kwargs"]
    problems = []
    for name in ray_init:
        if name not in known and not name.startswith("_"):
            close = nearest(name, known)
            hint = f"; did you mean {close}?" if close else "."
            problems.append(f"ray_kwargs.ray_init.{name} is not an argument of ray.init{hint}")
    if problems:
        raise ConfigError(problems)
    runtime_env = _runtime_env(cfg, without_those_of_the_job(ray_init.pop("runtime_env", None) or {}))
    ray_init = {
        "include_dashboard": False,
        "logging_level": logging.WARNING,
        "address": os.environ.get("RAY_ADDRESS", "local"),
        **ray_init,
    }
    is_own = ray_init["address"] == "local"
    if is_own and not ray_init["include_dashboard"]:
        ray_init["_system_config"] = OWN_RAY | dict(ray_init.get("_system_config") or {})
    # `ray_init` has no runtime_env here: any variable in it may be a secret.
    shown = without_secrets({name: ray_init[name] for name in cfg.ray_kwargs.ray_init if name in ray_init})
    given = ", ".join(f"{name}={value}" for name, value in shown.items()) or "nothing"
    try:
        with _guarded_start() if is_own else nullcontext(), _sigterm_kept():
            ray.init(**ray_init, runtime_env=runtime_env)
    except AuthenticationError as error:
        raise ConfigError(_refused(given, error.message)) from error
    except (ConnectionError, ValueError) as error:  # no cluster at that address, or keys that only a new one takes
        if not is_own and isinstance(error, ConnectionError) and (reason := _why_refused(ray_init["address"])):
            raise ConfigError(_refused(given, reason)) from error
        raise ConfigError(f"Ray can't be started with ray_kwargs.ray_init of {given}: {error}") from error
    return is_own


def _refused(given: str, reason: str) -> str:
    return (
        f"the Ray cluster of ray_kwargs.ray_init={{{given}}} refuses this command: {reason}. Set RAY_AUTH_MODE=token "
        "here and for `ray start` on every node, and give each the token of the first one: the file ~/.ray/auth_token, "
        "or the variable RAY_AUTH_TOKEN."
    )


def _why_refused(address: str) -> str | None:
    """What a cluster says to someone who shows no token; None if it has no objection, or nobody is there.

    Ray's own error says only that the cluster could not be reached.
    """
    import grpc

    from paceline.private_apis.ray_private import complete_address

    try:
        with grpc.insecure_channel(complete_address(address)) as channel:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=REFUSAL_SECONDS)
    except grpc.RpcError as error:
        return error.details() if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    except Exception:  # an address of another kind, such as ray://
        return None
    return None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray puts handlers of its own, which end the process at once, in the place of what was set."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _guarded_start() -> Iterator[None]:
    """A Ray of the run's own starts on this machine's loopback address, and within START_SECONDS, or not at all."""
    from paceline.private_apis.ray_private import single_node

    earlier = psutil.Process().children(recursive=True)
    started = threading.Event()

    def own_processes() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in earlier]

    def watch() -> None:
        gcs: psutil.Process | None = None
        began = last_running = time.monotonic()
        while not started.wait(0.2):
            state = None
            with suppress(psutil.Error):
                gcs = gcs or next((child for child in own_processes() if child.name() == "gcs_server"), None)
                state = gcs.status() if gcs is not None else psutil.STATUS_RUNNING
            now, why = time.monotonic(), ""
            if state != psutil.STATUS_STOPPED:
                last_running = now
            if state in (None, psutil.STATUS_ZOMBIE):
                why = "its process gcs_server ended"
            elif now - last_running > STOPPED_SECONDS:
                why = f"its process gcs_server is stopped for {STOPPED_SECONDS:.0f} s"
            elif now - began > START_SECONDS:
                why = f"it took more than {START_SECONDS:.0f} s"
            if why:
                # ray.init can't be interrupted: it waits in Ray's own code, which ends this process in the end.
                kill_processes(own_processes())
                start_again_or_end(f"Ray did not start: {why}.")

    threading.Thread(target=watch, name="start of Ray", daemon=True).start()
    try:
        with single_node():
            yield
    except BaseException as error:
        stop_ray(kill=False)
        kill_processes(own_processes())
        if not isinstance(error, Exception) or isinstance(error, (ConnectionError, ValueError)):
            raise
        raise WorkerError("ray", 0, "start", f"Ray did not start: {error}") from error
    finally:
        started.set()


def _runtime_env(cfg: AnyRunConfig, user: dict[str, object] | None) -> dict[str, object]:
    """Ours and the user's, with what the processes of this run report."""
    run = {**launch_variables(), LOG_FOLDER_VARIABLE: str(run_dir_of(cfg.trainer) / LOGS_FOLDER)}
    return merged_runtime_env(user, run=run)


def _options_in_running_ray(cfg: AnyRunConfig) -> dict[str, object]:
    """The options of the TaskRunner in a Ray that someone else started: only variables can still be set."""
    ray_init = dict(cfg.ray_kwargs.ray_init)
    runtime_env = _runtime_env(cfg, ray_init.pop("runtime_env", None))
    variables = runtime_env.pop("env_vars")
    unused = [*ray_init, *(f"runtime_env.{name}" for name in runtime_env)]
    if unused:
        logger.warning("Ray is running already, so these keys of ray_kwargs.ray_init are not used: %s", unused)
    return {"runtime_env": {"env_vars": variables}}
