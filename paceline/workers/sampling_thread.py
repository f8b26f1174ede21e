"""A rollout engine that decodes in a thread of its own, beside short calls.

A process computes one thing at a time: a call of the driver, or decoding steps of such a thread. Two at once would
share torch's threads, its random state and, in the worst case, weights that change under a step. So each call waits for
the step under way, and the thread waits until no call is there. `RoleWorker` takes a turn around every call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Turns:
    """Who may compute in a process.

    A call waits for the decoding step under way. Between two calls there is at least one step, so that a driver that
    asks without a pause does not keep a rollout from its work.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        """That run, one inside the other."""
        self._num_queued = 0
        """Calls that wait for their turn."""
        self._is_decoding = False
        self._waiting: list[Callable[[], bool]] = []
        """Of the threads that wait to decode, whether they want to."""
        self._is_step_due = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call, which may be inside another."""
        with self._changed:
            if not self._num_calls:
                self._num_queued += 1
                self._changed.wait_for(lambda: not self._is_decoding and not self._is_step_due)
                self._num_queued -= 1
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                if not self._num_calls:
                    self._is_step_due = any(is_wanted() for is_wanted in self._waiting)
                    self._changed.notify_all()

    @contextmanager
    def decoding(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Around decoding steps: waits until no call runs and `is_wanted` says so, which only calls may change."""

        def is_free() -> bool:
            return not self._is_decoding and not self._num_calls and (self._is_step_due or not self._num_queued)

        with self._changed:
            self._waiting.append(is_wanted)
            self._changed.wait_for(lambda: is_free() and is_wanted())
            self._waiting.remove(is_wanted)
            self._is_decoding, self._is_step_due = True, False
        try:
            yield
        finally:
            with self._changed:
                self._is_decoding = False
                self._changed.notify_all()

    def look_again(self) -> None:
        """What a thread waits for may have changed, and no call has said so."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_call_waiting(self) -> bool:
        """Whether decoding should end after this step."""
        return self._num_queued > 0


TURNS = Turns()
"""Of this process."""


class Decoder(Protocol):
    """An engine, as far as decoding goes; or what brings it requests."""

    @property
    def has_work(self) -> bool: ...

    @property
    def version(self) -> int: ...

    def decoding(self) -> AbstractContextManager[None]: ...

    def step(self) -> None: ...


class SamplingThread:
    """Decodes while its engine has work and is not paused. All methods, and all use of the engine, belong in calls. If
    it may have work without one, `Turns.look_again` must be called then.

    An error of the thread ends it and is raised by the next `check`.
    """

    def __init__(self, engine: Decoder, turns: Turns = TURNS) -> None:
        self.engine = engine
        self.is_paused = False
        self._turns = turns
        self._is_stopped = False
        self._error: BaseException | None = None
        self._sampled: list[tuple[float, float, int]] = []
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise self._error

    def sampled(self) -> list[tuple[float, float, int]]:
        """When it decoded since the last time: start, end (seconds since the epoch), and the version of the weights."""
        spans, self._sampled = self._sampled, []
        return spans

    def stop(self) -> None:
        """End the thread. Requests under way stay in the engine."""
        self._is_stopped = True

    def join(self) -> None:
        """Wait, outside of any call, until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        # Torch counts the threads of each thread separately, and vLLM's own check fails until it has been asked.
        torch.set_num_threads(self._num_threads)
        torch.get_num_threads()
        try:
            while not self._is_stopped:
                with self._turns.decoding(lambda: self._is_stopped or self._has_work), self.engine.decoding():
                    start = time.time()
                    while self._has_work and not self._is_stopped:
                        self.engine.step()
                        if self._turns.is_call_waiting:
                            break
                    self._sampled.append((start, time.time(), self.engine.version))
        except BaseException as error:
            self._error = error

    @property
    def _has_work(self) -> bool:
        return self.engine.has_work and not self.is_paused
