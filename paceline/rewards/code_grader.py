"""The scorer of the code sources with the sandbox that a configuration asks for."""

from __future__ import annotations

import logging
import os
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.config.reward import SandboxConfig
from paceline.rewards.sandbox import LocalSandbox, RemoteSandbox, Sandbox, SandboxLimits
from paceline.rewards.score import code
from paceline.rewards.scorers import Scorer

__all__ = ["CodeGrader", "code_scorer"]

logger = logging.getLogger(__name__)

REACH_SECONDS = 3.0


@dataclass(frozen=True)
class CodeGrader:
    """Grades programs. It can be pickled: the sandbox is made in the process that uses it, once for all graders."""

    config: SandboxConfig

    def __call__(self, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
        sandbox = _sandbox(self.config, _url(self.config))
        return code.compute_score(solution_str, ground_truth, extra_info, mode=self.config.mode, sandbox=sandbox)

    def many(
        self, solutions: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
    ) -> list[dict[str, Any] | Exception]:
        sandbox = _sandbox(self.config, _url(self.config))
        return code.compute_scores(solutions, ground_truths, extra_infos, mode=self.config.mode, sandbox=sandbox)

    def check(self) -> None:
        """Raise if this machine can't isolate programs; warn if the service can't be reached now."""
        url = _url(self.config)
        sandbox = _sandbox(self.config, url)
        if isinstance(sandbox, LocalSandbox):
            sandbox.check()
        else:
            _warn_unless_reachable(str(url))


def code_scorer(config: SandboxConfig) -> Scorer:
    """The scorer to give a RewardManager for each of CODE_SOURCES."""
    grader = CodeGrader(config)
    return Scorer(grader, grader.many, grader.check, code.check_ground_truth)


def _url(config: SandboxConfig) -> str | None:
    return config.url or os.environ.get(code.SANDBOX_URL)


@cache
def _sandbox(config: SandboxConfig, url: str | None) -> Sandbox:
    limits = SandboxLimits(
        cpu_seconds=config.cpu_seconds,
        wall_seconds=config.wall_seconds,
        memory_bytes=config.memory_limit_mb << 20,
    )
    if url is None:
        return LocalSandbox(limits, num_parallel=config.max_concurrent)
    further = {} if config.max_concurrent is None else {"concurrency": config.max_concurrent}
    return RemoteSandbox(url, timeout_seconds=config.timeout_seconds, retries=config.retries, limits=limits, **further)


def _warn_unless_reachable(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        logger.warning("The sandbox at %s can't be reached now: %s. Code would not be graded.", url, error)
