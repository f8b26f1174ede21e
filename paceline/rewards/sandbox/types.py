"""What a sandbox is given and gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NotRequired, Protocol, TypedDict

from paceline.errors import ConfigError

__all__ = ["JailFiles", "JailReport", "Program", "RunResult", "RunStatus", "Sandbox", "SandboxLimits"]

RunStatus = Literal["ok", "error", "timeout", "memory", "output", "sandbox_error"]
"""`ok`: exit code 0. `error`: another exit code, or a signal. `timeout`, `memory`, `output`: that limit was exceeded.
`sandbox_error`: the sandbox failed, which says nothing about the program."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use. All are hard: whoever exceeds one is ended, or refused what it asks for."""

    cpu_seconds: int = 5
    """CPU time of each process, at least 1."""
    wall_seconds: float = 10.0
    """From start to end. Time in which the program waits for a core of a busy machine does not count, up to as long
    again."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and resident memory of all together, at least 64 MiB."""
    num_processes: int = 16
    """Processes and threads at one time."""
    output_bytes: int = 4 << 20
    """Standard output, and as much again of standard error."""
    file_bytes: int = 16 << 20
    """The largest file."""
    disk_bytes: int = 64 << 20
    """All files together. They are held in memory."""
    num_open_files: int = 128
    """Open files of each process."""

    def __post_init__(self) -> None:
        least = {"cpu_seconds": 1, "memory_bytes": 64 << 20, "num_open_files": 16}
        problems = [
            f"SandboxLimits.{field.name}={getattr(self, field.name)!r}; set it to at least {least.get(field.name, 1)}."
            for field in fields(self)
            if getattr(self, field.name) < (least.get(field.name, 1) if field.name != "wall_seconds" else 0.1)
        ]
        if not isinstance(self.cpu_seconds, int):
            problems.append(f"SandboxLimits.cpu_seconds={self.cpu_seconds!r}; the kernel counts whole seconds.")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Program:
    """Python source and what it reads from standard input."""

    code: str
    stdin: str = ""


@dataclass(frozen=True)
class RunResult:
    """How a program ended.

    >>> RunResult("ok", stdout="42\\n", exit_code=0).ok
    True
    """

    status: RunStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """Negative for the signal that ended it; None if it has none, as when it was killed at a limit."""
    seconds: float = 0.0
    message: str = ""
    """What happened, where `status` does not say it all."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Sandbox(Protocol):
    """Where programs run."""

    def run(self, program: Program) -> RunResult:
        """Run one program to its end, or to its limits."""
        ...

    def run_many(self, programs: Sequence[Program]) -> list[RunResult]:
        """Run many, side by side; results in the order of the programs."""
        ...


class JailFiles(TypedDict):
    """What a jail is made of, whatever runs in it."""

    python: str
    binds: list[str]
    links: list[tuple[str, str]]
    hidden: list[str]
    environment: dict[str, str]
    calls: NotRequired[dict[str, int]]
    """Numbers of the system calls that it makes itself, and the filter of those that programs may make; on machines
    where they are known."""
    filter: NotRequired[bytes]


class JailReport(TypedDict, total=False):
    """What the jail says when a program has ended, or why it did not begin."""

    seconds: float
    cpu_seconds: float
    exit_code: int
    reason: RunStatus | Literal["lost"]
    failed: str
