"""How long paceline takes to answer: imports, --help of each command, and a configuration with mistakes.

Each is a process of its own, measured in turns. Printed: median seconds of CPU time (user and system, which other work
on the machine changes least) and of wall time, beside an interpreter that does nothing.

    python -m benchmarks.startup
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.table import report

COMMANDS = ("quickstart", "train", "data", "report", "export", "doctor", "config", "rollout")
MISTAKES = ("algorithm.adv_estimator=gea", "trainer.nnodes=0", "data.train_files=nowhere.parquet")


def seconds_of(arguments: Sequence[str], expected: int) -> tuple[float, float]:
    """CPU and wall seconds of a Python process."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != expected:
        raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    cli = ["-c", "import sys; from paceline.cli import main; sys.exit(main())"]
    ways = {
        "python -c pass": (["-c", "pass"], 0),
        "import paceline": (["-c", "import paceline"], 0),
        "import paceline's DataProto": (["-c", "from paceline import DataProto"], 0),
        "paceline --help": ([*cli, "--help"], 0),
        **{f"paceline {command} --help": ([*cli, command, "--help"], 0) for command in COMMANDS},
        "python -m paceline.trainer.main_ppo --help": (["-m", "paceline.trainer.main_ppo", "--help"], 0),
        "a configuration with mistakes": ([*cli, "train", *MISTAKES], 2),
    }
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.repeats + 1):
        for name, (arguments, expected) in ways.items():
            taken = seconds_of(arguments, expected)
            if turn:  # The first is for the disk's cache.
                cpu[name].append(taken[0])
                wall[name].append(taken[1])
    report("start, CPU time", cpu, "s", of=None)
    report("start, wall time", wall, "s", of=None)


if __name__ == "__main__":
    main()
