"""Runs programs that nobody has read: in a jail on this machine, or by a service on another."""

from __future__ import annotations

from paceline.rewards.sandbox.local import LocalSandbox
from paceline.rewards.sandbox.remote import RemoteSandbox
from paceline.rewards.sandbox.types import Program, RunResult, RunStatus, Sandbox, SandboxLimits

__all__ = ["LocalSandbox", "Program", "RemoteSandbox", "RunResult", "RunStatus", "Sandbox", "SandboxLimits"]
