"""Runs programs in jails on this machine, many at a time. `jail.py` says what a jail is."""

from __future__ import annotations

import logging
import marshal
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO

from paceline.errors import ConfigError, SandboxUnavailableError
from paceline.machine import num_cores
from paceline.rewards.sandbox.system_calls import ARCHITECTURES, call_numbers, filter_code
from paceline.rewards.sandbox.types import JailFiles, JailReport, Program, RunResult, RunStatus, SandboxLimits

__all__ = ["LocalSandbox"]

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.5
"""A program that has run so long no longer keeps others from starting: many that hang wait out their time together."""
MOST_PER_CORE = 16
BUSY_FACTOR = 2
"""With all waiting for a core of a busy machine, a program may take so many times its wall time."""
PROBE_SECONDS = 60
PAUSES_SECONDS = (0.2, 1.0)
"""Before further attempts, where a jail failed."""
GRACE_SECONDS = 10.0
"""How long after the last moment at which it would end its program a jail that does not answer is killed."""

_JAIL_FILE = Path(__file__).resolve().with_name("jail.py")
_SCRIPT = "/program/main.py"


class LocalSandbox:
    """Runs Python programs with no network, no files but an empty folder, and hard limits.

    It needs Linux 5.14 or later with user namespaces; root or not does not matter. The first use tries a program, and
    raises a `SandboxUnavailableError` that says what is missing if it can't be isolated. Nothing ever runs outside a
    jail. Can be used from many threads.

    Args:
        limits: what each program may use.
        num_parallel: how many run at most at one time; by default 16 per core, as far as half of the free memory
            reaches. Of these, as many as there are cores are young (half a second): the others hang, or work long
            and give way.
    """

    def __init__(self, limits: SandboxLimits | None = None, num_parallel: int | None = None) -> None:
        self.limits = limits or SandboxLimits()
        if num_parallel is not None and num_parallel < 1:
            raise ConfigError(f"LocalSandbox.num_parallel={num_parallel}; set it to at least 1, or None.")
        cores = num_cores()
        fitting = _free_memory() // 2 // (self.limits.memory_bytes + self.limits.disk_bytes)
        self.num_parallel = num_parallel or max(1, min(MOST_PER_CORE * cores, fitting))
        self._places = threading.Semaphore(self.num_parallel)
        self._young = threading.Semaphore(cores)
        self._checking = threading.Lock()
        self._checked = False
        self._files = _visible_files()
        if hasattr(os, "uname") and os.uname().machine in ARCHITECTURES:
            self._files["calls"], self._files["filter"] = call_numbers(), filter_code()

    def check(self) -> None:
        """Raise a `SandboxUnavailableError` unless programs can be isolated here."""
        with self._checking:
            if self._checked:
                return
            if not sys.platform.startswith("linux"):
                raise SandboxUnavailableError(_refusal(f"this is {sys.platform}, not Linux"))
            if "filter" not in self._files:
                known = " and ".join(ARCHITECTURES)
                found = f"there is no system call filter for {os.uname().machine}, only for {known}"
                raise SandboxUnavailableError(_refusal(found))
            # Whether it can be isolated must not depend on how busy the machine is.
            patient = replace(self.limits, wall_seconds=PROBE_SECONDS, cpu_seconds=PROBE_SECONDS)
            result = self._run(Program("print(6 * 7)"), patient)
            if result.status != "ok" or result.stdout != "42\n":
                found = result.message or f"a test program ended with {result.status}: {result.stderr.strip()[-500:]}"
                raise SandboxUnavailableError(_refusal(found))
            self._checked = True

    def run(self, program: Program) -> RunResult:
        """Run one program to its end, or to its limits; again if the jail fails, which is no fault of the program's."""
        self.check()
        with self._places:
            for pause in PAUSES_SECONDS:
                result = self._run(program, self.limits)
                if result.status != "sandbox_error":
                    return result
                time.sleep(pause)
            return self._run(program, self.limits)

    def run_many(self, programs: Sequence[Program]) -> list[RunResult]:
        """Run many, side by side; results in the order of the programs."""
        self.check()
        if len(programs) < 2:
            return [self.run(program) for program in programs]
        with ThreadPoolExecutor(min(len(programs), self.num_parallel), thread_name_prefix="sandbox") as threads:
            return list(threads.map(self.run, programs))

    def _run(self, program: Program, limits: SandboxLimits) -> RunResult:
        turn = _Turn(self._young)
        try:
            return _Run(program, limits, self._files, turn).result()
        except OSError as error:
            logger.warning("The sandbox could not start a program: %s", error)
            return RunResult("sandbox_error", message=f"starting the jail: {error}")
        finally:
            turn.end()


class _Turn:
    """The right to start, given back when the program ends or is no longer young."""

    def __init__(self, young: threading.Semaphore) -> None:
        self._young: threading.Semaphore | None = young
        young.acquire()

    def end(self) -> None:
        if self._young is not None:
            self._young.release()
            self._young = None


class _Run:
    """One program in its jail: reads what it writes, as far as the limits go, and waits for its end."""

    def __init__(self, program: Program, limits: SandboxLimits, files: JailFiles, turn: _Turn) -> None:
        self.limits = limits
        self.turn = turn
        self.outputs = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self.reason: RunStatus | None = None
        spec = {
            "parent": os.getpid(),
            "code": program.code.encode("utf-8", "surrogatepass"),
            "stdin": program.stdin.encode("utf-8", "surrogatepass"),
            "script": _SCRIPT,
            "limits": {**asdict(limits), "latest_seconds": BUSY_FACTOR * limits.wall_seconds},
            **files,
        }
        self.started = time.monotonic()
        self.status, theirs = socket.socketpair()
        try:
            with theirs, os.fdopen(os.memfd_create("sandbox_spec"), "w+b") as file:
                file.write(marshal.dumps(spec))
                file.seek(0)
                # Not the environment's interpreter: its site-packages only cost time. It ends when this thread does.
                self.process = subprocess.Popen(
                    [files["python"], "-I", "-S", str(_JAIL_FILE), str(theirs.fileno())],
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env={"LD_LIBRARY_PATH": files["environment"]["LD_LIBRARY_PATH"]},
                    cwd="/",
                )
        except BaseException:
            self.status.close()
            raise

    def result(self) -> RunResult:
        try:
            self._read()
        finally:
            self.status.close()  # the jail ends with it
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()
            try:
                self.process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("A jail did not end by itself within %g s and was killed", GRACE_SECONDS)
                self.process.kill()
                self.process.wait()
        return self._outcome()

    def _read(self) -> None:
        last_moment = self.started + BUSY_FACTOR * self.limits.wall_seconds + GRACE_SECONDS
        sources: dict[str, IO[bytes] | socket.socket | None] = {
            "stdout": self.process.stdout,
            "stderr": self.process.stderr,
            "status": self.status,
        }
        with selectors.DefaultSelector() as selector:
            for name, source in sources.items():
                if source is not None:
                    selector.register(source, selectors.EVENT_READ, name)
            while selector.get_map():
                now = time.monotonic()
                if now > self.started + SLOW_SECONDS:
                    self.turn.end()
                if now > last_moment:
                    self.reason = "timeout"
                    return
                for key, _ in selector.select(timeout=SLOW_SECONDS):
                    if not self._take(key.data, key.fd):
                        selector.unregister(key.fileobj)
                if self.reason is not None:
                    return

    def _take(self, name: str, descriptor: int) -> bool:
        """Read what is there; False at the end."""
        data = os.read(descriptor, 1 << 16)
        kept = self.outputs[name]
        room = len(data) if name == "status" else self.limits.output_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.reason = "output"
        return bool(data)

    def _outcome(self) -> RunResult:
        texts = {name: bytes(data).decode("utf-8", "replace") for name, data in self.outputs.items()}
        try:
            report: JailReport = marshal.loads(bytes(self.outputs["status"]))
        except (EOFError, ValueError, TypeError):  # killed before or while it spoke
            report = {}
        seconds = report.get("seconds", time.monotonic() - self.started)
        ended = partial(RunResult, stdout=texts["stdout"], stderr=texts["stderr"], seconds=seconds)
        if self.reason is not None:
            return ended(self.reason)
        if "failed" in report:
            return ended("sandbox_error", message=report["failed"])
        reason = report.get("reason")
        if not report or reason == "lost":
            message = (
                "the jail ended without a report; was it killed from outside, or did the machine run out of memory?"
            )
            return ended("sandbox_error", message=message)
        if reason is not None:
            return ended(reason)
        code = report["exit_code"]
        return ended(_status(code, report["cpu_seconds"], texts["stderr"], self.limits), exit_code=code)


def _status(code: int, cpu_seconds: float, stderr: str, limits: SandboxLimits) -> RunStatus:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
        return "timeout"
    if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    return "error"


def _visible_files() -> JailFiles:
    """The interpreter and the libraries that it needs; the folders of installed packages are hidden."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    own_libraries = [str(folder) for name in ("lib", "lib64") if (folder := Path(sys.base_prefix, name)).is_dir()]
    system = ["/lib", "/usr/lib", "/lib64", "/usr/lib64"]
    links = [(path, os.readlink(path)) for path in system if os.path.islink(path)]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch and Path("/usr/lib", multiarch).is_dir():  # then /usr/lib holds programs beside the libraries
        system[:2] = [f"/lib/{multiarch}", f"/usr/lib/{multiarch}"]
    libraries = [*system, *own_libraries, sysconfig.get_path("stdlib")]
    binds: list[str] = []
    for path in sorted({os.path.realpath(path) for path in [*libraries, python] if os.path.exists(path)}):
        if not any(Path(path).is_relative_to(bound) for bound in binds):
            binds.append(path)
    installed = [Path(sysconfig.get_path("stdlib"), name) for name in ("site-packages", "dist-packages")]
    environment = {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": ":".join(own_libraries),
        "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MB of address space
        "PATH": "/nonexistent",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "TMPDIR": "/tmp",
    }
    return {
        "python": python,
        "binds": binds,
        "links": links,
        "hidden": [os.path.realpath(folder) for folder in installed if folder.is_dir()],
        "environment": environment,
    }


def _refusal(found: str) -> str:
    """Why nothing is run, and what to change."""
    remedies = []
    release = os.uname().release if hasattr(os, "uname") else ""
    numbers = release.replace("-", ".").split(".")[:2]
    if sys.platform.startswith("linux") and all(number.isdigit() for number in numbers):
        if tuple(map(int, numbers)) < (5, 14):
            remedies.append(f"the kernel is {release}: run Linux 5.14 or later")
        for path, bad, remedy in (
            ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
            ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
            (
                "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
                "1",
                "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            ),
        ):
            if _setting(path) == bad:
                remedies.append(f"user namespaces are switched off by {path}={bad}: as root, {remedy}")
    if not remedies:
        remedies.append(
            "in a container, allow user namespaces and an unmasked /proc (Docker: --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined)"
        )
    return (
        f"LocalSandbox can't isolate programs on this machine, so it runs none: {found}. To have it: "
        f"{'; '.join(remedies)}. Or set PACELINE_SANDBOX_URL to a SandboxFusion service (RemoteSandbox)."
    )


def _free_memory() -> int:
    for line in _setting("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _setting(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
