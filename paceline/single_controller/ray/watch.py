"""Waiting for calls without ever waiting in vain.

Every call leaves two references: its result, and its record, which is small and fails when the call fails. The watch
holds the records of all calls of all groups that have not finished. Whoever waits for a result waits for its record,
and watches all the others meanwhile: when one rank fails, the rank that was asked may be stuck in a collective with it.

It consumes record references, it waits in `fetch` alone, and it is unblocked by the wanted records, by the first
failure of any call, or by a worker whose heartbeat stops. One watch per driver process, used by one thread.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from paceline.errors import RemoteCause, WorkerError
from paceline.single_controller.base.calls import CallRecord
from paceline.single_controller.ray.death import DEATHS, explain_death
from paceline.single_controller.ray.heartbeat import Beat, Place, read_beat

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
MEANWHILE_SECONDS = 0.1
"""How often what is done while the driver waits is done."""
REPORT_SECONDS = 30.0
STARTUP_SECONDS = 300.0
"""How long a process may be silent while it starts: Python, and the libraries of its workers, whose loading holds up
the thread of heartbeats, too."""
RECORDS_SECONDS = 45.0
"""How long Ray's records may leave a question open. After a minute Ray ends every process that can't reach them."""
SETTLE_SECONDS = 1.5
"""How long to look for the cause after a first exception: when a process dies, its peers' collectives fail as well, and
often first."""


@dataclass(eq=False)
class Process:
    """What the driver knows of one worker process."""

    actor: Any
    rank: int
    heartbeat_key: str
    heartbeat_timeout_seconds: float
    is_starting: bool = False
    """Whether its workers are still being constructed."""
    location: Place | None = None
    last_beat: Beat | None = None
    last_change: float = field(default_factory=time.monotonic)
    death: tuple[str, str] | None = None
    """What is known of its death: the cause, and the end of its stderr."""

    def silent_seconds(self) -> float | None:
        """Seconds of silence when they exceed the limit, else None; by the driver's clock, as nodes' clocks differ."""
        beat = read_beat(self.heartbeat_key)
        now = time.monotonic()
        if beat != self.last_beat:
            self.last_beat, self.last_change = beat, now
        limit = self.heartbeat_timeout_seconds
        if self.is_starting or not beat:
            limit = max(STARTUP_SECONDS, limit)
        silent = now - self.last_change
        return silent if silent > limit else None

    def silence(self) -> str | None:
        """The error message for a process that is silent for too long, else None."""
        if (seconds := self.silent_seconds()) is None:
            return None
        seen = f" It was {self.last_beat}." if self.last_beat else ""
        return (
            f"no heartbeat for {seconds:.0f} s ({self.location or 'not started'}); the process is stopped, "
            f"starved or its node is gone.{seen} The limit is heartbeat_timeout_seconds="
            f"{self.heartbeat_timeout_seconds:g}."
        )


class Pulse:
    """Watches the heartbeat of a process from a thread, since reading it may block forever.

    Only the thread waits for Ray's records; `silence` and `lost_records` return at once.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._silence: str | None = None
        self._asked = time.monotonic()
        self._is_asking = False
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._stopped.set()

    def silence(self) -> str | None:
        """The error message for a process that is silent for too long, else None."""
        return self._silence

    def lost_records(self) -> str | None:
        """The error message if Ray's records do not answer, else None."""
        seconds = time.monotonic() - self._asked
        if not self._is_asking or seconds < min(RECORDS_SECONDS, self._process.heartbeat_timeout_seconds):
            return None
        return (
            f"Ray's own records have not answered for {seconds:.0f} s: its process gcs_server, on the first node of "
            "the cluster, is stopped, starved or gone, or can't be reached from here."
        )

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if not self._is_asking:
                self._asked, self._is_asking = time.monotonic(), True
            with suppress(Exception):  # Ray's records are gone, and Ray knows it: there is no answer
                self._silence = self._process.silence()
                self._is_asking = False


@dataclass(frozen=True, eq=False)
class PendingCall:
    """A call on one rank that has not answered."""

    call_id: int
    """The same on all ranks of a call; later calls have higher ones."""
    process: Process
    role: str
    method: str
    result_id: bytes
    inputs: frozenset[int] = frozenset()
    """The calls whose results are arguments of this one."""
    issued: float = field(default_factory=time.monotonic)

    def error(self, message: str, remote_traceback: str = "", cause: RemoteCause | None = None) -> WorkerError:
        return WorkerError(self.role, self.process.rank, self.method, message, remote_traceback, cause)


@dataclass(frozen=True)
class Failure:
    call: PendingCall
    error: WorkerError
    is_death: bool


class CallWatch:
    """The calls of this driver process that have not finished; see the module's docstring."""

    def __init__(self) -> None:
        self._session = ""
        self._last_call_id = 0
        self._is_joint = False
        self._next_heartbeat_check = 0.0
        self.deadline = math.inf
        self.meanwhile: Callable[[], None] | None = None
        self._next_meanwhile = 0.0
        self._clear()

    def _clear(self) -> None:
        self._pending: dict[ray.ObjectRef, PendingCall] = {}  # by record
        self._record_of: dict[bytes, ray.ObjectRef] = {}  # by result id: the result itself must not be kept alive here
        self._failures: list[Failure] = []
        self._reported: dict[bytes, WorkerError] = {}  # by result id: a later request gets the same error
        self._records: deque[CallRecord] = deque(maxlen=100_000)

    def new_call_id(self) -> int:
        self._check_session()
        self._last_call_id += not self._is_joint
        return self._last_call_id

    @contextmanager
    def joint_calls(self) -> Iterator[None]:
        """See the function of this name."""
        self._last_call_id += 1
        self._is_joint = True
        try:
            yield
        finally:
            self._is_joint = False

    def add(self, record: ray.ObjectRef, call: PendingCall) -> None:
        self._pending[record] = call
        self._record_of[call.result_id] = record

    def unfinished(self, results: Iterable[ray.ObjectRef]) -> frozenset[int]:
        """The ids of the unfinished calls that give these results."""
        records = (self._record_of.get(result.binary()) for result in results)
        return frozenset(self._pending[record].call_id for record in records if record is not None)

    def fetch(self, results: list[ray.ObjectRef], calls: Sequence[PendingCall]) -> list[Any]:
        """The values of `results`, which `calls` give; raises the first failure of any watched call instead."""
        wanted = {self._record_of[result.binary()] for result in results if result.binary() in self._record_of}
        started = time.monotonic()
        next_report = started + REPORT_SECONDS
        while True:
            self._poll((POLL_SECONDS if self.meanwhile is None else MEANWHILE_SECONDS) if wanted else 0.0, wanted)
            if self._failures:
                raise self._first_failure()
            self._do_meanwhile()  # also between short waits, one after another
            wanted &= self._pending.keys()
            if not wanted:
                break
            self._check_heartbeats()
            if time.monotonic() > self.deadline:
                call = min((self._pending[record] for record in wanted), key=lambda call: call.process.rank)
                raise call.error("no answer in the time that was left after an earlier failure.")
            if time.monotonic() > next_report:
                next_report += REPORT_SECONDS
                logger.warning("waiting since %.0f s for %s", time.monotonic() - started, self._describe(wanted))
        for result in results:
            if result.binary() in self._reported:
                raise self._reported[result.binary()]
        try:
            return ray.get(results)
        except RayError:
            raise _find_lost(results, calls) from None

    def raise_failure(self) -> None:
        """Raise the failure of a call that is known, or is in a moment: what was not to be had may follow from it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._pending and not self._failures and time.monotonic() < deadline:
            self._poll(0.1)
        if self._failures:
            raise self._first_failure()

    def _do_meanwhile(self) -> None:
        """What the driver does while it waits; what that waits for is waited for alone."""
        do = self.meanwhile
        if do is None or time.monotonic() < self._next_meanwhile:
            return
        self.meanwhile = None
        try:
            do()
        finally:
            self.meanwhile = do
            self._next_meanwhile = time.monotonic() + MEANWHILE_SECONDS

    def drain(self) -> list[CallRecord]:
        """The records of the calls that finished since the last time."""
        self._check_session()
        self._poll(0.0)
        records = list(self._records)
        self._records.clear()
        return records

    def running(self) -> dict[str, str]:
        """The method that each role with unfinished calls is at, or waits for. Another thread may ask."""
        oldest: dict[Process, PendingCall] = {}
        for call in list(self._pending.values()):
            oldest.setdefault(call.process, call)
        return {call.role: call.method for call in oldest.values()}

    def forget(self, processes: Iterable[Process]) -> None:
        """Drop the unfinished calls of these processes: their results are not needed any more."""
        gone = set(processes)
        self._drop(lambda call: call.process in gone)

    def _check_session(self) -> None:
        session = ray.get_runtime_context().get_worker_id()
        if session != self._session:  # references of an earlier ray.init mean nothing in this one
            self._session = session
            self._clear()

    def _poll(self, timeout_seconds: float, wanted: Collection[ray.ObjectRef] = ()) -> None:
        """Move what has finished to the records or the failures; first wait so long for all of `wanted`, or for any.

        For all of them at once: to wake up for each would cost the driver the square of their number.
        """
        if not (refs := list(self._pending)):
            return
        if timeout_seconds:
            ray.wait(list(wanted) or refs, num_returns=len(wanted) or 1, timeout=timeout_seconds, fetch_local=False)
        finished = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]
        for record, outcome in zip(finished, _outcomes(finished), strict=True):
            call = self._pending.pop(record)
            del self._record_of[call.result_id]
            if isinstance(outcome, RayError):
                self._failures.append(_to_failure(call, outcome))
            elif isinstance(outcome, bytes):
                self._records.append(pickle.loads(outcome))

    def _first_failure(self) -> WorkerError:
        """The failure to report: that of the earliest call, since later ones may follow from it; in it, a death first.

        The call's other ranks and the calls that take its result fail for the same reason; they are not reported again.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._cause_may_come() and time.monotonic() < deadline:
            self._poll(0.1)
        failure = min(self._failures, key=lambda failure: (failure.call.call_id, not failure.is_death))
        related = {failure.call.call_id}
        calls = [*self._pending.values(), *(failure.call for failure in self._failures)]
        for call in sorted(calls, key=lambda call: call.call_id):
            if call.inputs & related:
                related.add(call.call_id)
            if call.call_id in related:
                self._reported[call.result_id] = failure.error
        self._drop(lambda call: call.call_id in related)
        return failure.error

    def _cause_may_come(self) -> bool:
        """Whether an unfinished call may be what the failures so far follow from.

        Of a process that died, Ray fails the calls in no order; the earliest is the one that it was at.
        """
        if dead := {failure.call.process for failure in self._failures if failure.is_death}:
            return any(call.process in dead for call in self._pending.values())
        return any(call.call_id == self._failures[0].call.call_id for call in self._pending.values())

    def _check_heartbeats(self) -> None:
        if time.monotonic() < self._next_heartbeat_check:
            return
        self._next_heartbeat_check = time.monotonic() + POLL_SECONDS
        oldest: dict[Process, PendingCall] = {}
        for call in self._pending.values():
            oldest.setdefault(call.process, call)
        for process, call in oldest.items():
            if (silence := process.silence()) is not None:
                raise call.error(silence)

    def _drop(self, condition: Callable[[PendingCall], bool]) -> None:
        for record, call in list(self._pending.items()):
            if condition(call):
                del self._pending[record], self._record_of[call.result_id]
        self._failures = [failure for failure in self._failures if not condition(failure.call)]

    def _describe(self, records: Iterable[ray.ObjectRef]) -> str:
        ranks: dict[str, list[int]] = {}
        for record in records:
            call = self._pending[record]
            ranks.setdefault(f"{call.role}.{call.method}", []).append(call.process.rank)
        return ", ".join(f"{name} (ranks {', '.join(map(str, sorted(found)))})" for name, found in ranks.items())


watch = CallWatch()


def joint_calls() -> AbstractContextManager[None]:
    """Inside, calls of several groups whose workers wait for each other are issued: a failure is one of all of them,
    and is explained by a death among them, whichever call failed first."""
    return watch.joint_calls()


@contextmanager
def limited_wait(seconds: float) -> Iterator[None]:
    """Inside, no wait for a call goes on after so many seconds: it ends in a WorkerError."""
    watch.deadline = time.monotonic() + seconds
    try:
        yield
    finally:
        watch.deadline = math.inf


@contextmanager
def meanwhile(do: Callable[[], None]) -> Iterator[None]:
    """Inside, whoever waits for a call does this again and again until it has ended; an error of it is the wait's."""
    watch.meanwhile = do
    try:
        yield
    finally:
        watch.meanwhile = None


def drain_call_records() -> list[CallRecord]:
    """The records of all calls, of all groups of this process, that finished since the last time."""
    return watch.drain()


def running_calls() -> dict[str, str]:
    """What the worker processes are at: role to method."""
    return watch.running()


def _find_lost(results: Iterable[ray.ObjectRef], calls: Sequence[PendingCall]) -> WorkerError:
    """Which of the results of finished calls can't be had any more, e.g. because the node that held it is gone."""
    by_result = {call.result_id: call for call in calls}
    for result in results:
        try:
            ray.get(result)
        except RayError as error:
            return _to_failure(by_result.get(result.binary(), calls[0]), error).error
    return calls[0].error("its result was lost and came back; ask again.")


def _outcomes(records: list[ray.ObjectRef]) -> list[object]:
    """What each of these gives: its value, or the error that it failed with."""
    try:
        return ray.get(records)
    except RayError:
        return [_outcome(record) for record in records]


def _outcome(record: ray.ObjectRef) -> object:
    try:
        return ray.get(record)
    except RayError as error:
        return error


def _to_failure(call: PendingCall, error: RayError) -> Failure:
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, WorkerError):
            return Failure(call, error.cause, is_death=False)
        message = f"{type(error.cause).__name__}: {error.cause}"
        return Failure(call, call.error(message, str(error), RemoteCause.of(error.cause)), is_death=False)
    process = call.process
    if isinstance(error, DEATHS):
        if process.death is None:  # each call that waited for it fails, and reading its stderr takes time
            process.death = explain_death(error, process.location, read_beat(process.heartbeat_key))
        message, stderr = process.death
        return Failure(call, call.error(message, stderr), is_death=True)
    return Failure(call, call.error(f"{type(error).__name__}: {error}"), is_death=False)
