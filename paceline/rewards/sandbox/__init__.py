"""Runs programs that nobody has read: in a jail on this machine, or by a service on another."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from paceline.rewards.sandbox.local import LocalSandbox
from paceline.rewards.sandbox.remote import RemoteSandbox
from paceline.rewards.sandbox.types import Program, RunResult, RunStatus, Sandbox, SandboxLimits

if TYPE_CHECKING:  # a sandbox works without any installed package
    from paceline.config.reward import SandboxConfig

__all__ = [
    "SANDBOX_URL",
    "LocalSandbox",
    "Program",
    "RemoteSandbox",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxLimits",
    "sandbox_of",
]

SANDBOX_URL = "PACELINE_SANDBOX_URL"
"""The environment variable that names a remote sandbox; without it, programs run in jails on this machine."""


def sandbox_of(config: SandboxConfig | None) -> LocalSandbox | RemoteSandbox:
    """The sandbox that a configuration asks for, one for all who ask in this process; None is for the defaults."""
    return _sandbox(config, (config and config.url) or os.environ.get(SANDBOX_URL))


@cache
def _sandbox(config: SandboxConfig | None, url: str | None) -> LocalSandbox | RemoteSandbox:
    if config is None:
        return RemoteSandbox(url) if url else LocalSandbox()
    limits = SandboxLimits(
        cpu_seconds=config.cpu_seconds,
        wall_seconds=config.wall_seconds,
        memory_bytes=config.memory_limit_mb << 20,
    )
    if url is None:
        return LocalSandbox(limits, num_parallel=config.max_concurrent)
    further = {} if config.max_concurrent is None else {"concurrency": config.max_concurrent}
    return RemoteSandbox(url, timeout_seconds=config.timeout_seconds, retries=config.retries, limits=limits, **further)
