"""Runs calls of one function in processes that can be killed. `killable.py` starts this file as a script of its own.

It imports nothing but what the function needs. The first message names the function; the answer is None, or what went
wrong. After that every message is `(calls, timeout_seconds)`, and each call is answered by an `Outcome`. There are two
ways to run calls:

- in this process, one after the other, or, for what is awaitable, all together, after AWAITING. Each is answered as
  soon as it ends. The other end of the pipe watches the clock, and kills this process;
- in workers that are forked from this process, as many as there are cores. They are warm at once, since the function is
  loaded. This process watches the clock, kills and replaces workers, and answers when all calls have ended. It is for
  functions that start no threads.

When the other end closes the pipe, or dies, this process and its workers end.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from paceline.external import import_file

AWAITING = "awaiting"
PR_SET_PDEATHSIG = 1
ORPHAN_CHECK_SECONDS = 1.0

SLOW_SECONDS = 0.1
"""A call that has used so much CPU time gives its turn to a further worker, so that many hopeless calls wait out one
deadline together, not one after the other."""
FAIR_SHARE = 0.05
GRACE = 4
"""A call that got less than this share of a core until its deadline, because the machine is busy, is given up to so
many deadlines: what is right must not become wrong by the load of others."""
TICK_SECONDS = 0.05
MAX_SLOW_WORKERS = 64

Call = tuple[tuple[object, ...], dict[str, object]]
Outcome = tuple[int, bytes | None, str]
"""Number of the call; its pickled result or exception, None if it can't be pickled; the same as text."""


def load(source: bytes) -> Callable[..., object]:
    """The function that `killable.py` names: pickled; by its file and name; or what a function of a file makes."""
    kind, *what = pickle.loads(source)
    if kind == "function":
        function: Callable[..., object] = what[0]
        return function
    file, name = what
    found: Callable[..., Callable[..., object]] = getattr(import_file(file, "paceline_custom_reward"), name)
    return found() if kind == "maker" else found


def attempt(
    fn: Callable[..., object], call: Call, catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException
) -> object:
    """What the call gives, or what it raises."""
    try:
        return fn(*call[0], **call[1])
    except catch as error:
        return error


def outcome(number: int, result: object) -> Outcome:
    """For the pipe. An exception takes its traceback along as a note."""
    if isinstance(result, BaseException):
        text = "".join(traceback.format_exception(result))
        if not isinstance(result, Exception):  # sys.exit() is the function's failure, not our end
            result = RuntimeError(f"the function ended with {result!r}")
        result.add_note(text)
    else:
        text = f"a {type(result).__name__} that can't be sent between processes"
    try:
        return number, pickle.dumps(result), text
    except Exception:
        return number, None, text


def receive(connection: Connection, parent: int) -> Any:
    """The next message. Raises an EOFError when the parent is gone, which its pipe does not always show: other
    processes may hold copies of its end."""
    while not connection.poll(ORPHAN_CHECK_SECONDS):
        if os.getppid() != parent:
            raise EOFError
    return connection.recv()


# -- in this process --------------------------------------------------------------------------------------------------


def serve(connection: Connection, fn: Callable[..., object], parent: int) -> None:
    """Answer calls in this process."""
    while True:
        calls, timeout_seconds = receive(connection, parent)
        waiting: dict[int, Awaitable[object]] = {}
        for number, call in enumerate(calls):
            result = attempt(fn, call)
            if inspect.isawaitable(result):
                waiting[number] = result
            else:
                connection.send(outcome(number, result))
        if waiting:
            connection.send(AWAITING)
            asyncio.run_coroutine_threadsafe(
                finish(connection, waiting, timeout_seconds), event_loop(os.getpid())
            ).result()


async def finish(connection: Connection, waiting: dict[int, Awaitable[object]], timeout_seconds: float) -> None:
    async def one(number: int, awaitable: Awaitable[object]) -> None:
        result: object
        try:
            result = await asyncio.wait_for(awaitable, timeout_seconds)
        except BaseException as error:
            result = error
        connection.send(outcome(number, result))

    await asyncio.gather(*(one(number, awaitable) for number, awaitable in waiting.items()))


@cache
def event_loop(pid: int) -> asyncio.AbstractEventLoop:
    """One loop for the whole life of a process, so that a user's client or session can be kept between batches."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop


# -- in forked workers ------------------------------------------------------------------------------------------------


class ForkedWorker:
    """A forked process that runs one call at a time."""

    def __init__(self, fn: Callable[..., object], memory_bytes: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=work, args=(theirs, fn, memory_bytes), daemon=True)
        self.process = process
        self.process.start()
        theirs.close()
        self.times = psutil.Process(self.process.pid)
        self.number: int | None = None
        """Of its call; None while it is idle."""
        self.started = 0.0
        self.cpu_at_start = 0.0

    def give(self, number: int, call: Call, timeout_seconds: float) -> None:
        self.number, self.started, self.cpu_at_start = number, time.monotonic(), self._cpu_seconds()
        self.connection.send((number, call, GRACE * timeout_seconds))

    def _cpu_seconds(self) -> float:
        try:
            times = self.times.cpu_times()
        except psutil.Error:  # it has just ended, which its pipe will show
            return 0.0
        return float(times.user + times.system)

    def is_slow(self) -> bool:
        elapsed = time.monotonic() - self.started
        return elapsed > SLOW_SECONDS and self._cpu_seconds() - self.cpu_at_start > SLOW_SECONDS

    def is_late(self, timeout_seconds: float) -> bool:
        elapsed = time.monotonic() - self.started
        if elapsed < timeout_seconds:
            return False
        used = self._cpu_seconds() - self.cpu_at_start
        return used >= FAIR_SHARE * timeout_seconds or elapsed >= GRACE * timeout_seconds

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def work(connection: Connection, fn: Callable[..., object], memory_bytes: int) -> None:
    """The life of a worker."""
    server = os.getppid()
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            number, call, longest_seconds = receive(connection, server)
        except EOFError:
            return
        # The server kills at the deadline; the kernel does so later if the server itself was killed.
        signal.setitimer(signal.ITIMER_REAL, longest_seconds + 5)
        answer = outcome(number, attempt(fn, call))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(answer)


class ForkServer:
    """Spreads calls over workers.

    Args:
        client: the pipe that calls come from.
        fn: the function.
        num_workers: how many work at one time, beside slow ones.
        memory_bytes: address space that a worker may take on top of what it starts with.
    """

    def __init__(self, client: Connection, fn: Callable[..., object], num_workers: int, memory_bytes: int) -> None:
        self.client = client
        self.fn = fn
        self.num_workers = num_workers
        self.memory_bytes = memory_bytes
        self.workers: list[ForkedWorker] = []

    def serve(self, parent: int) -> None:
        """Answer calls until the client ends."""
        try:
            while True:
                calls, timeout_seconds = receive(self.client, parent)
                for answer in self._run(calls, timeout_seconds):
                    self.client.send(answer)
        finally:
            for worker in list(self.workers):
                self._remove(worker)

    def _run(self, calls: Sequence[Call], timeout_seconds: float) -> list[Outcome]:
        outcomes = []
        waiting = deque(enumerate(calls))
        while True:
            self._hand_out(waiting, timeout_seconds)
            busy = {worker.connection: worker for worker in self.workers if worker.number is not None}
            if not busy:
                break
            ready = wait([*busy, self.client], timeout=TICK_SECONDS)
            if self.client in ready:  # nothing is sent to a server at work: this is the end of the client
                raise EOFError
            for connection in [connection for connection in busy if connection in ready]:
                worker = busy.pop(connection)
                outcomes.append(self._receive(worker))
                worker.number = None
            for worker in busy.values():
                if worker.number is not None and worker.is_late(timeout_seconds):
                    outcomes.append(outcome(worker.number, TimeoutError(f"it took longer than {timeout_seconds:g} s")))
                    self._remove(worker)
        for worker in self.workers[self.num_workers :]:
            self._remove(worker)
        return outcomes

    def _hand_out(self, waiting: deque[tuple[int, Call]], timeout_seconds: float) -> None:
        if not waiting:
            return
        for worker in [worker for worker in self.workers if worker.number is None and not worker.process.is_alive()]:
            self._remove(worker)
        idle = [worker for worker in self.workers if worker.number is None]
        quick = sum(worker.number is not None and not worker.is_slow() for worker in self.workers)
        most = self.num_workers + MAX_SLOW_WORKERS
        while waiting and quick < self.num_workers and (idle or len(self.workers) < most):
            if not idle:
                self.workers.append(ForkedWorker(self.fn, self.memory_bytes))
                idle.append(self.workers[-1])
            idle.pop().give(*waiting.popleft(), timeout_seconds)
            quick += 1

    def _receive(self, worker: ForkedWorker) -> Outcome:
        try:
            received: Outcome = worker.connection.recv()
            return received
        except (EOFError, OSError):
            worker.process.join()
            ended = RuntimeError(f"the grading process ended with exit code {worker.process.exitcode}")
            self._remove(worker)
            return outcome(worker.number or 0, ended)

    def _remove(self, worker: ForkedWorker) -> None:
        worker.kill()
        self.workers.remove(worker)


def main(descriptor: int, dies_with_parent: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client's end ends us
    if dies_with_parent and sys.platform == "linux":  # also in the middle of a call that hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    client = Connection(descriptor)
    try:
        source, num_workers, memory_bytes = client.recv()
        fn = attempt(load, ((source,), {}))
        client.send(outcome(0, fn if isinstance(fn, BaseException) else None))
        if not callable(fn):
            return
        if num_workers:
            ForkServer(client, fn, num_workers, memory_bytes).serve(parent)
        else:
            serve(client, fn, parent)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1")
