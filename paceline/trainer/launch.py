"""Ray around a run: started if none is running, and the run's own process watched, stopped and started again in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from paceline.command_line import sigterm_as_interrupt
from paceline.config import AnyRunConfig
from paceline.config.derived import run_dir_of, with_trainer_keys
from paceline.config.load import to_dictconfig
from paceline.errors import PacelineError, ResourceError, WorkerError
from paceline.report.status import end_status
from paceline.run_folder import CHECKPOINTS_FOLDER, STOP_FILE, VALIDATION_FOLDER, list_checkpoints
from paceline.trainer.ray_session import ANSWER_SECONDS, RaySession, kill_processes, within
from paceline.trainer.same_command import StartAgain, is_one_command
from paceline.trainer.same_command import attempt as this_attempt

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorClass, ActorHandle

    from paceline.single_controller.ray.heartbeat import Place

    TaskRunnerClass = type | ActorClass

logger = logging.getLogger(__name__)

NODE_SECONDS = 300.0
"""How long a restart waits for nodes, if what is left of the cluster is too small."""
NODE_POLL_SECONDS = 2.0
POLL_SECONDS = 1.0
KILL_SECONDS = 5.0
"""How long Ray may take to end a process of the run in someone else's Ray."""


@contextmanager
def running_ray(cfg: AnyRunConfig) -> Iterator[RaySession]:
    """The Ray that is running, or one for this block alone.

    Errors of paceline that come out of Ray inside the block are raised as themselves. Ray's own timeline is written
    when the block ends well and the configuration asks for it.
    """
    import ray

    with sigterm_as_interrupt():
        session = _first_session(cfg)
        try:
            with _ray_errors_as_ours():
                yield session
            if cfg.ray_kwargs.timeline_json_file:
                Path(cfg.ray_kwargs.timeline_json_file).parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(filename=cfg.ray_kwargs.timeline_json_file)
        finally:
            session.close()


def _first_session(cfg: AnyRunConfig) -> RaySession:
    """A Ray that does not start is tried as often again as a run that dies."""
    for restarts_left in reversed(range(this_attempt.restarts(cfg.trainer.max_restarts) + 1)):
        this_attempt.restarts_left = restarts_left
        try:
            return RaySession(cfg)
        except WorkerError as error:
            if restarts_left == 0:
                raise
            logger.error("%s", error)
    raise AssertionError("a last attempt returns or raises")


def run_with_restarts(task_runner_class: TaskRunnerClass, session: RaySession, cfg: AnyRunConfig) -> None:
    """Run to the end. The death of any process is survived `trainer.max_restarts` times, from the last checkpoint.

    All processes of the run end with its TaskRunner, so one way of starting again serves every kind of death. A Ray of
    the run's own is started anew, whichever process died: it may be one of Ray's.
    """
    attempt, run = _resuming(cfg) if this_attempt.goes_on else cfg, _run_to_end
    for restarts_left in reversed(range(this_attempt.restarts(cfg.trainer.max_restarts) + 1)):
        this_attempt.restarts_left = restarts_left
        try:
            session.open()
            run(task_runner_class, session, attempt)
            return
        except WorkerError as error:
            if not _may_pass(error):
                raise
            if session.is_lost and not session.is_own:
                logger.error("the run ends, as the Ray that it joined is gone: %s", _advice(cfg))
                raise
            if restarts_left == 0:
                logger.error("the run ends: %s", _advice(cfg))
                raise
            logger.error("%s", error)
            this_attempt.goes_on = True
            attempt, run = _resuming(cfg), _run_to_end if session.is_own else _run_when_it_fits
            logger.warning(
                "starting again from %s; %d more restarts (trainer.max_restarts=%d)",
                "the last checkpoint" if attempt is not cfg else "the beginning",
                restarts_left - 1, cfg.trainer.max_restarts,
            )  # fmt: skip
            if session.is_lost and is_one_command():
                # Ray ends a process a minute after it has lost its gcs_server, also when a new one was started there.
                raise StartAgain from None


def _may_pass(error: WorkerError) -> bool:
    """Whether another attempt may end otherwise; what paceline raises on purpose in a worker would come again."""
    return not error.caused_by(PacelineError)


def _has_checkpoint(cfg: AnyRunConfig) -> bool:
    return bool(list_checkpoints(run_dir_of(cfg.trainer) / CHECKPOINTS_FOLDER))


def _advice(cfg: AnyRunConfig) -> str:
    """What to do about a run that ended by a death."""
    by_itself = f"trainer.max_restarts={cfg.trainer.max_restarts + 3} lets it do so by itself"
    if _has_checkpoint(cfg):
        return f"with trainer.resume_mode=auto the same command goes on from its last checkpoint; {by_itself}"
    return f"it has no checkpoint, so the same command starts from the beginning; set trainer.save_freq; {by_itself}"


def _resuming(cfg: AnyRunConfig) -> AnyRunConfig:
    """The configuration of the next attempt: it goes on from the run's own checkpoints if there are any."""
    if not _has_checkpoint(cfg):
        return cfg
    return with_trainer_keys(cfg, resume_mode="auto", resume_from_path=None)


def _run_when_it_fits(task_runner_class: TaskRunnerClass, session: RaySession, cfg: AnyRunConfig) -> None:
    """After a death: if a node went with it, the cluster is given time to put another in its place."""
    deadline = time.monotonic() + NODE_SECONDS
    reported = False
    while True:
        try:
            return _run_to_end(task_runner_class, session, cfg)
        except ResourceError as error:
            if time.monotonic() > deadline:
                raise
            if not reported:
                logger.warning("waiting up to %.0f s for nodes to come back: %s", NODE_SECONDS, error)
                reported = True
            time.sleep(NODE_POLL_SECONDS)


def _run_to_end(task_runner_class: TaskRunnerClass, session: RaySession, cfg: AnyRunConfig) -> None:
    """Make the actor and wait for its `run`; whatever ends the wait early (Ctrl-C too) ends the actor as well."""
    import ray
    from ray.actor import ActorClass

    options = session.options()
    if isinstance(task_runner_class, ActorClass):
        actor_class: ActorClass = task_runner_class
        # Its author chose its resources and its place.
        options = {name: value for name, value in options.items() if name == "runtime_env"}
    else:
        actor_class = ray.remote(task_runner_class)
    stop_file = run_dir_of(cfg.trainer) / STOP_FILE
    if not cfg.trainer.val_only:  # only a look: the folder may belong to a run that is going on
        stop_file.unlink(missing_ok=True)  # meant for an earlier run
    began = time.time()
    runner = cast("ActorHandle", actor_class.options(**options).remote())
    watcher = _Watcher(session, runner, cfg.trainer.heartbeat_timeout_seconds)
    try:
        running: ObjectRef = runner.run.remote(to_dictconfig(cfg))
        with _ray_errors_as_ours():
            try:
                watcher.wait(running)
            except KeyboardInterrupt:
                if not cfg.trainer.save_on_interrupt or cfg.trainer.val_only:
                    raise
                stop_file.parent.mkdir(parents=True, exist_ok=True)
                stop_file.touch()  # before the words: a terminal that is not read would hold them up
                logger.warning("ending after this step, with a checkpoint; Ctrl-C again to stop at once")
                watcher.wait(running)
                raise
    except BaseException as error:
        watcher.stop()
        _end_run(session, runner, watcher.place())
        is_stop = isinstance(error, KeyboardInterrupt)
        run_dir = run_dir_of(cfg.trainer) / (VALIDATION_FOLDER if cfg.trainer.val_only else "")
        reported = None if is_stop else f"{type(error).__name__}: {error}"
        end_status(run_dir, "stopped" if is_stop else "failed", reported, since=began)
        raise
    watcher.stop()
    _forget(runner)


class _Watcher:
    """Waits for the run, as long as its process beats and Ray's own processes are there."""

    def __init__(self, session: RaySession, runner: ActorHandle, heartbeat_timeout_seconds: float) -> None:
        from paceline.private_apis.ray_private import id_of_actor
        from paceline.single_controller.ray.heartbeat import beat_and_locate
        from paceline.single_controller.ray.watch import Process, Pulse

        self._session = session
        self._limit = heartbeat_timeout_seconds
        # Of any class, also one of a user's that knows nothing of it: a process that does not beat counts as dead.
        self._located: ObjectRef = runner.__ray_call__.remote(beat_and_locate)
        self._process: Process = Process(runner, 0, id_of_actor(runner), heartbeat_timeout_seconds)
        self._pulse: Pulse = Pulse(self._process)

    def stop(self) -> None:
        """End the watch."""
        self._pulse.stop()

    def place(self) -> Place | None:
        """Where the run's process is, once it has said so."""
        import ray
        from ray.exceptions import RayError

        if self._process.location is None:
            with suppress(RayError):
                self._process.location = ray.get(self._located, timeout=0)
        return self._process.location

    def wait(self, running: ObjectRef) -> None:
        import ray

        while not ray.wait([running], timeout=POLL_SECONDS)[0]:
            self.place()
            if (problem := self._session.problem(self._limit) or self._pulse.lost_records()) is not None:
                self._session.is_lost = True
                raise WorkerError("task_runner", 0, "run", problem)
            if (problem := self._pulse.silence()) is not None:
                raise WorkerError("task_runner", 0, "run", problem)
        ray.get(running)


def _end_run(session: RaySession, runner: ActorHandle, place: Place | None) -> None:
    """End the actor and with it the whole run, in a time with an end; a Ray of the run's own ends with it."""
    import ray
    from ray.exceptions import RayError

    if session.is_own:
        session.close()
        return
    here = place is not None and place.node_id == ray.get_runtime_context().get_node_id()
    process = None
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(place.pid) if here and place else None
    with suppress(RayError):
        ray.kill(runner)
    _forget(runner)
    if process is not None:  # one that is stopped does not hear Ray
        psutil.wait_procs([process], timeout=KILL_SECONDS)
        kill_processes([process])


def _forget(runner: ActorHandle) -> None:
    """Remove what Ray keeps of the actor: its heartbeat, and its placement groups until the whole job ends."""
    from paceline.private_apis.ray_private import id_of_actor
    from paceline.single_controller.ray.heartbeat import forget_beats

    actor_id = id_of_actor(runner)

    def forget() -> None:
        _remove_reservations(actor_id)
        forget_beats(actor_id)

    with suppress(Exception):  # of a Ray that is gone, and all of it with it
        within(ANSWER_SECONDS, forget)


def _remove_reservations(actor_id: str) -> None:
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
        death, actor_id = error, getattr(error, "actor_id", None)

        def explain() -> tuple[str, str]:
            place, beat = (place_of_actor(actor_id), read_beat(actor_id)) if actor_id else (None, None)
            return explain_death(death, place, beat)

        reported: tuple[str, str] | None = None
        with suppress(Exception):  # Ray itself is gone, too
            reported = within(ANSWER_SECONDS, explain)
        raise WorkerError("task_runner", 0, "run", *(reported or (str(error), ""))) from None
