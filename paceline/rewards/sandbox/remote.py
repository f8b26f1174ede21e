"""Runs programs on a service that speaks SandboxFusion's `/run_code`."""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.errors import ConfigError
from paceline.rewards.sandbox.types import Program, RunResult, RunStatus, SandboxLimits

__all__ = ["RemoteSandbox"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
REACH_SECONDS = 3.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that another attempt may change."""


class RemoteSandbox:
    """Posts programs to a service, as many at a time as it may be given.

    A service that can't be reached, is busy, or fails, is asked again; what then still fails is a result with status
    `sandbox_error`, not an exception. Can be used from many threads. The isolation is the service's.

    Args:
        url: the address of the service, or of its `/run_code`.
        concurrency: how many programs it is given at one time.
        timeout_seconds: for one attempt, from connecting to the end of the answer; time in a queue of the service
            is part of it. At least the limit on wall time.
        retries: how many attempts may follow the first.
        limits: `wall_seconds` and `memory_bytes` are sent with each program, `output_bytes` cuts what comes back; the
            other limits are the service's.
    """

    def __init__(
        self,
        url: str,
        concurrency: int = 16,
        timeout_seconds: float = 30.0,
        retries: int = 3,
        limits: SandboxLimits | None = None,
    ) -> None:
        self.limits = limits or SandboxLimits()
        parts = urllib.parse.urlsplit(url)
        problems = []
        if parts.scheme not in ("http", "https") or not parts.netloc:
            problems.append(f"The sandbox's url is {url!r}; give one such as http://sandbox:8080.")
        if concurrency < 1:
            problems.append(f"RemoteSandbox.concurrency={concurrency}; set it to at least 1.")
        if retries < 0:
            problems.append(f"RemoteSandbox.retries={retries}; set it to 0 or more.")
        if timeout_seconds < self.limits.wall_seconds:
            problems.append(
                f"RemoteSandbox.timeout_seconds={timeout_seconds:g} is shorter than a program may run "
                f"(limits.wall_seconds={self.limits.wall_seconds:g}); raise it or lower that."
            )
        if problems:
            raise ConfigError(problems)
        self.url = url if parts.path.endswith("/run_code") else url.rstrip("/") + "/run_code"
        self.concurrency = concurrency
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self._places = threading.Semaphore(concurrency)
        # No proxies from the environment for what is mostly a service next door; no redirects with other people's code.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def check(self) -> None:
        """Warn if the service can't be reached now."""
        parts = urllib.parse.urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=REACH_SECONDS).close()
        except OSError as error:
            url = self.url.removesuffix("/run_code")
            logger.warning("The sandbox at %s can't be reached now: %s. Code would not be graded.", url, error)

    def run(self, program: Program) -> RunResult:
        """Run one program; asks again while the service fails."""
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
                time.sleep(pause * random.uniform(0.5, 1.0))
            try:
                with self._places:
                    return _result(self._post(program), self.limits.output_bytes)
            except urllib.error.HTTPError as error:
                with error:
                    failure = f"{error.code} {error.reason}: {_shown(error)}"
                if error.code not in _PASSING:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
        message = f"{self.url} did not run the program in {attempt + 1} attempts; the last: {failure}"
        logger.warning("%s", message)
        return RunResult("sandbox_error", message=message)

    def run_many(self, programs: Sequence[Program]) -> list[RunResult]:
        """Run many, `concurrency` at a time; results in the order of the programs."""
        if len(programs) < 2:
            return [self.run(program) for program in programs]
        with ThreadPoolExecutor(min(len(programs), self.concurrency), thread_name_prefix="sandbox") as threads:
            return list(threads.map(self.run, programs))

    def _post(self, program: Program) -> dict[str, object]:
        body = {
            "code": program.code,
            "language": "python",
            "stdin": program.stdin,
            "run_timeout": self.limits.wall_seconds,
            "compile_timeout": self.limits.wall_seconds,
            "memory_limit_MB": self.limits.memory_bytes >> 20,
        }
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        deadline = time.monotonic() + self.timeout_seconds
        # Answers are JSON, in which a byte of output may take six.
        longest = 12 * self.limits.output_bytes + (1 << 16)
        with self._opener.open(request, timeout=self.timeout_seconds) as response:
            received = bytearray()
            # The time-out of a socket is for each read, so a service that trickles would never be given up.
            while piece := response.read1(1 << 16):
                received += piece
                if len(received) > longest:
                    raise ValueError(f"the answer is longer than {longest} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no complete answer in {self.timeout_seconds:g} s")
        reply = json.loads(received)
        if not isinstance(reply, dict) or "status" not in reply:
            raise ValueError(f"the answer has no `status`: {bytes(received[:200])!r}")
        if reply["status"] == "SandboxError":
            raise ValueError(f"SandboxError: {str(reply.get('message'))[:500]}")
        result: object = reply.get("run_result")
        if not isinstance(result, dict):
            raise ValueError(f"the answer has no `run_result`: {bytes(received[:200])!r}")
        return result


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _result(run: dict[str, object], output_bytes: int) -> RunResult:
    """The service's words for what happened, in ours. Raises a `ValueError` for words that we don't know."""
    said = run.get("status")
    code = run.get("return_code")
    code = code if isinstance(code, int) else None
    stdout, stderr = str(run.get("stdout") or ""), str(run.get("stderr") or "")
    status: RunStatus
    if said == "TimeLimitExceeded":
        status = "timeout"
    elif said not in ("Finished", "Error"):
        raise ValueError(f"run_result.status={said!r}; known are Finished, TimeLimitExceeded and Error")
    elif said == "Finished" and code == 0:
        status = "ok"
    elif code is None and said == "Error":
        raise ValueError(f"the service failed to run the program: {stderr[-500:]}")
    elif stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        status = "memory"
    else:
        status = "error"
    if len(stdout) > output_bytes or len(stderr) > output_bytes:
        status, stdout, stderr = "output", stdout[:output_bytes], stderr[:output_bytes]
    seconds = run.get("execution_time")
    seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
    return RunResult(status, stdout=stdout, stderr=stderr, exit_code=code, seconds=seconds)


def _shown(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(500).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
