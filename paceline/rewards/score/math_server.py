"""Symbolic equality in processes that can be killed. `score/math.py` starts this file as a script of its own.

It imports no other module of paceline, so that it starts fast and has no threads, and forks workers
that are warm at once. It is given batches `(deadline_seconds, [(gold, answer), ...])` over a pipe and answers each
with a list of verdicts; a text instead of a pair asks for its last formula. A worker that exceeds the deadline of its
question is killed and replaced. When the other end of the pipe closes, even by a SIGKILL, this process and its workers
end.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import sympy.core.random
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

Question = tuple[str, str] | str
"""Are the two equal? Or: which is the last formula of a text?"""
Verdict = bool | list[str] | None | str
"""Right or wrong, or formulas; None if it took too long or too much memory; a message for a failure of the grader."""

SLOW_SECONDS = 0.1
"""A pair that has used so much CPU time gives its turn to a further worker, so that many hopeless pairs wait out one
deadline together, not one after the other."""
FAIR_SHARE = 0.05
GRACE = 4
"""A pair that got less than this share of a core until its deadline, because the machine is busy, is given up to so
many deadlines: what is right must not become wrong by the load of others."""
TICK_SECONDS = 0.05
MAX_SLOW_WORKERS = 64
WORKER_MEMORY_BYTES = 2 << 30
"""Address space that a worker may take on top of what it starts with; `9^{9^{9^9}}` takes all there is."""
ORPHAN_CHECK_SECONDS = 1.0

_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
_LATEX = LatexExtractionConfig(
    # math-verify's units are letters, too: it would read 5t as 5.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
)
LONGEST_TEXT = 10_000
"""Characters, the last of a response, in which a formula is looked for."""
CLOSE = 1e-4
"""Share by which a number and its decimals may differ; math-verify alone rounds to six decimals, and so 1e-9 to 0."""


def equivalent(gold: str, answer: str) -> bool:
    """Whether two expressions in LaTeX are mathematically equal. What sympy cannot compare is not equal."""
    for expected, found in itertools.product(_parsed(gold), _parsed(answer)):
        try:
            if verify(expected, found, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True):
                return _is_close(expected, found)
        except MemoryError:
            raise
        except Exception:  # such as a division by zero
            continue
    return False


def last_formula(text: str) -> list[str]:
    """The last formula or number of a text, by math-verify's rules; none if there is none."""
    found = parse(
        text[-LONGEST_TEXT:],
        extraction_config=[_LATEX, ExprExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return [formula for formula in found if isinstance(formula, str)]


def _is_close(expected: Any, found: Any) -> bool:
    numbers = [getattr(side, "is_number", False) for side in (expected, found)]
    if not all(numbers) or not (expected.has(sympy.Float) or found.has(sympy.Float)):
        return True
    return bool(abs(expected - found).evalf() <= CLOSE * abs(expected).evalf())


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> tuple[Any, ...]:
    """What math-verify reads: an expression if it can, and always the text."""
    latex = _REPEATING.sub(_fraction_of_repeating, latex)
    return tuple(parse(f"${latex}$", extraction_config=[_LATEX], parsing_timeout=None))


def _fraction_of_repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} is 1/6; the parser would read it as 0."""
    whole, fixed, repeated = match.groups()
    start = Fraction(f"{whole or 0}.{fixed or 0}")
    value = start + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


class Worker:
    """A forked process that grades one pair at a time."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.times = psutil.Process(self.process.pid)
        self.item: int | None = None
        self.started = 0.0
        self.cpu_at_start = 0.0

    def give(self, item: int, pair: Question, deadline_seconds: float) -> None:
        self.item, self.started, self.cpu_at_start = item, time.monotonic(), self._cpu_seconds()
        self.connection.send((pair, GRACE * deadline_seconds))

    def _cpu_seconds(self) -> float:
        try:
            times = self.times.cpu_times()
        except psutil.Error:  # it has just ended, which its pipe will tell
            return 0.0
        return times.user + times.system

    def is_slow(self) -> bool:
        elapsed = time.monotonic() - self.started
        return elapsed > SLOW_SECONDS and self._cpu_seconds() - self.cpu_at_start > SLOW_SECONDS

    def is_late(self, deadline_seconds: float) -> bool:
        elapsed = time.monotonic() - self.started
        if elapsed < deadline_seconds:
            return False
        used = self._cpu_seconds() - self.cpu_at_start
        return used >= FAIR_SHARE * deadline_seconds or elapsed >= GRACE * deadline_seconds

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection) -> None:
    server = os.getppid()
    limit = psutil.Process().memory_info().vms + WORKER_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        # Brothers hold copies of the other end, so its close does not always show as an end of file.
        while not connection.poll(ORPHAN_CHECK_SECONDS):
            if os.getppid() != server:
                return
        try:
            question, longest_seconds = connection.recv()
        except EOFError:
            return
        # The server kills at the deadline; the kernel does so later if the server itself was killed.
        signal.setitimer(signal.ITIMER_REAL, longest_seconds + 5)
        sympy.core.random.seed(0)
        verdict: Verdict
        try:
            verdict = last_formula(question) if isinstance(question, str) else equivalent(*question)
        except MemoryError:
            verdict = None
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error)[:200]}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(verdict)


class Server:
    """Spreads pairs over workers."""

    def __init__(self, client: Connection, cores: int) -> None:
        self.client = client
        self.cores = cores
        self.workers: list[Worker] = []

    def grade(self, pairs: Sequence[Question], deadline_seconds: float) -> list[Verdict]:
        verdicts: list[Verdict] = ["not graded"] * len(pairs)
        waiting = deque(range(len(pairs)))
        while True:
            self._hand_out(waiting, pairs, deadline_seconds)
            busy = {worker.connection: worker for worker in self.workers if worker.item is not None}
            if not busy:
                break
            ready = wait([*busy, self.client], timeout=TICK_SECONDS)
            if self.client in ready:  # nothing is sent to a server at work: this is the end of the client
                raise EOFError
            for connection in ready:
                worker = busy.pop(connection)
                item, worker.item = worker.item, None
                verdicts[item] = self._receive(worker)
            for worker in busy.values():
                if worker.is_late(deadline_seconds):
                    verdicts[worker.item] = None
                    self._remove(worker)
        for worker in self.workers[self.cores :]:
            self._remove(worker)
        return verdicts

    def _hand_out(self, waiting: deque[int], pairs: Sequence[Question], deadline_seconds: float) -> None:
        if not waiting:
            return
        for worker in [worker for worker in self.workers if worker.item is None and not worker.process.is_alive()]:
            self._remove(worker)
        idle = [worker for worker in self.workers if worker.item is None]
        quick = sum(worker.item is not None and not worker.is_slow() for worker in self.workers)
        while waiting and quick < self.cores and (idle or len(self.workers) < self.cores + MAX_SLOW_WORKERS):
            if not idle:
                self.workers.append(Worker())
                idle.append(self.workers[-1])
            item = waiting.popleft()
            idle.pop().give(item, pairs[item], deadline_seconds)
            quick += 1

    def _receive(self, worker: Worker) -> Verdict:
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            code = worker.process.exitcode
            self._remove(worker)
            return f"the grading process ended with exit code {code}"

    def _remove(self, worker: Worker) -> None:
        worker.kill()
        self.workers.remove(worker)

    def close(self) -> None:
        for worker in list(self.workers):
            self._remove(worker)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client's end ends us
    logging.disable(logging.CRITICAL)
    # Workers inherit the parser's tables, which are filled by use.
    for gold, answer in [(r"\frac{1}{2}+x", "x+0.5"), (r"(1,2]", r"\{1,\sqrt{2}\}"), ("x^2+2x+1", "(x+1)^2")]:
        equivalent(gold, answer)
    client = Connection(descriptor)
    server = Server(client, int(os.environ["PACELINE_CORES"]))  # this file runs without the package
    parent = os.getppid()
    try:
        while True:
            while not client.poll(ORPHAN_CHECK_SECONDS):
                if os.getppid() != parent:
                    return
            deadline_seconds, pairs = client.recv()
            client.send(server.grade(pairs, deadline_seconds))
    except (EOFError, OSError):
        return
    finally:
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
