"""Two machines for a test: network namespaces with an address and a loopback device each, joined by a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

RAY = [str(Path(sys.executable).with_name("ray"))]
PORT = 6379


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def can_make_namespaces() -> bool:
    """Whether this user may, and the tool is here."""
    name = f"pl{uuid.uuid4().hex[:8]}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@dataclass(frozen=True)
class Machine:
    """A namespace. `variables` are those of a shell there."""

    name: str
    device: str
    address: str
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, command: list[str], output: Path, **variables: str) -> subprocess.Popen:
        """Type a command there."""
        environment = {**os.environ, **self.variables, **variables}
        with output.open("a") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def run(self, command: list[str], output: Path, **variables: str) -> int:
        return self.start(command, output, **variables).wait(timeout=300)

    def pids(self) -> list[int]:
        """Of all processes there."""
        return [int(word) for word in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """The power goes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", self.device, "up")


@contextmanager
def two_machines(**variables: str) -> Iterator[tuple[Machine, Machine]]:
    """Both end with the block, with all of their processes."""
    mark = uuid.uuid4().hex[:6]
    machines = tuple(
        Machine(f"pl{mark}{number}", f"v{mark}{number}", f"10.77.{int(mark[:2], 16)}.{number}", variables)
        for number in (1, 2)
    )
    first, second = machines
    try:
        for machine in machines:
            ip("netns", "add", machine.name)
        ip("link", "add", first.device, "netns", first.name, "type", "veth",
           "peer", "name", second.device, "netns", second.name)  # fmt: skip
        for machine in machines:
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            ip("-n", machine.name, "link", "set", "lo", "up")
            machine.mend()
        yield first, second
    finally:
        for machine in machines:
            with suppress(subprocess.CalledProcessError):
                machine.kill()
                ip("netns", "del", machine.name)
