"""Whole training steps of several systems, each in processes of its own, timed side by side in slices.

A system runs until it has made its steps. paceline's are read from its timeline; others note the end of each step in a
file. All have the niceness of Ray's workers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from json import JSONDecodeError
from pathlib import Path

from benchmarks.slices import SlicedProcess, take_slices
from benchmarks.table import remark, report
from paceline.report.timeline import read_events, spans
from paceline.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV

WORKER_VARIABLES = PPO_RAY_RUNTIME_ENV["env_vars"]
PEERS = Path(__file__).parents[1] / ".peers"
NICENESS_OF_RAY_WORKERS = 15
"""Ray's default. Others get it too, or whatever else the machine does would slow down paceline alone."""
STEPS_TO_THE_SLOWEST = 8
"""How many steps a system makes, at most, while the slowest makes one. Prompts are made for so many."""
STEP_ENDS = "step_ends.txt"
"""Where a loop other than paceline notes when each step ended, a line each."""

Run = Callable[[Path, str, int, int, Path], None]
"""Runs a system: material, workload, prompts per step, threads, the folder for its records."""


@dataclass(frozen=True)
class StepBenchmark:
    """Which systems take the same steps. The first of `runs` is the one that others are compared with."""

    name: str
    """What a step is called, such as "PPO step"."""
    module: str
    """The benchmark's module, which is started again for each of `runs`."""
    runs: Mapping[str, Run]
    """Ours by name; those that begin with "paceline" are the ordinary command on Ray."""
    peers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Others by name: the environment in .peers, and the script in benchmarks/peers that runs there."""

    def systems(self) -> list[str]:
        """All that can run here; a remark says which can't."""
        there = {name: (PEERS / environment).exists() for name, (environment, _) in self.peers.items()}
        for name in (name for name, is_there in there.items() if not is_there):
            remark(f"{self.name}: {name} is left out: `make bench-peers` installs it.")
        return [*self.runs, *(name for name, is_there in there.items() if is_there)]

    def start(
        self, system: str, material: Path, workload: str, folder: Path, args: argparse.Namespace
    ) -> SlicedProcess:
        """The steps of one system, in processes of its own."""
        folder.mkdir()
        arguments = [str(material), workload, str(args.prompts), str(args.threads), str(folder)]
        if system in self.peers:
            peer, script = self.peers[system]
            command = [str(PEERS / peer / "bin" / "python"), str(Path(__file__).parent / "peers" / script), *arguments]
        else:
            command = [sys.executable, "-m", self.module, "--run", system, *arguments]
        environment = os.environ | {"RAY_ADDRESS": "local"}
        if not system.startswith("paceline"):  # whose workers have a niceness and a number of threads of their own
            command = ["nice", "-n", str(NICENESS_OF_RAY_WORKERS), *command]
            environment["OMP_NUM_THREADS"] = str(args.threads)
        if system.startswith("bare"):  # as paceline's workers; peers run as one would run them
            environment |= {name: value for name, value in WORKER_VARIABLES.items() if name.startswith("MALLOC_")}
        return SlicedProcess(command, environment, folder / "log.txt")

    def compare(self, workload: str, material: Path, args: argparse.Namespace) -> None:
        """Run all in slices until each has its steps, and report them."""
        folders = {system: material / f"{workload} {system}" for system in self.systems()}
        with ExitStack() as ending:
            processes: dict[str, SlicedProcess] = {}
            for system, folder in folders.items():
                processes[system] = self.start(system, material, workload, folder, args)
                ending.callback(processes[system].end)
                processes[system].run_until(partial(has_steps, folder, 1))
            take_slices(
                list(processes.values()),
                until=lambda: all(has_steps(folder, 1 + args.steps) for folder in folders.values()),
            )
            seconds = {
                system: [process.own_seconds(*step) for step in compared_steps(folders[system], args.steps)]
                for system, process in processes.items()
            }
            shares = driver_shares(folders["paceline"], processes["paceline"], args.steps)
            memory = {system: [process.largest_resident() / 2**20] for system, process in processes.items()}
        report(f"{self.name}, {workload} lengths", seconds, "s", of="paceline")
        report(f"driver's share of a {self.name}, {workload} lengths", {"paceline": shares}, "%", of="paceline")
        report(f"largest process of a {self.name}, {workload} lengths", memory, "MiB", of="paceline")

    def run_as_asked(self) -> bool:
        """Whether this process is one of `start`'s; then the system that it was asked for has run to its end."""
        if sys.argv[1:2] != ["--run"]:
            return False
        _, _, system, material, workload, prompts, threads, folder = sys.argv
        self.runs[system](Path(material), workload, int(prompts), int(threads), Path(folder))
        return True


def has_steps(folder: Path, count: int) -> bool:
    """Whether a system has come so far."""
    try:
        return len(step_times(folder)) >= count
    except (FileNotFoundError, JSONDecodeError):  # not begun, or stopped in the middle of writing
        return False


def step_times(folder: Path) -> list[float]:
    """When the steps of a system ended; those of paceline ended when the next one's rollout, or update, began."""
    if (folder / STEP_ENDS).exists():
        return [float(line) for line in (folder / STEP_ENDS).read_text().splitlines()]
    timeline = folder / "timeline.json"
    begun = spans(timeline, "generate_sequences") or spans(timeline, "update_model")
    return [begin for begin, _ in begun][1:]


def compared_steps(folder: Path, count: int) -> list[tuple[float, float]]:
    """Beginnings and ends of the first steps behind the one for warming up: later ones may be slower."""
    return [*pairwise(step_times(folder)[: count + 1])]


def driver_shares(folder: Path, process: SlicedProcess, count: int) -> list[float]:
    """Percent of each of these steps of paceline in which its worker did nothing."""
    calls = [event for event in read_events(folder / "timeline.json") if event["args"]["pool"] == "global_pool"]
    shares = []
    for begin, end in compared_steps(folder, count):
        busy = sum(
            process.own_seconds(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in calls
            if begin <= event["ts"] / 1e6 < end
        )
        shares.append(100 * (1 - busy / process.own_seconds(begin, end)))
    return shares


def step_parser(description: str | None, *, prompts: int) -> argparse.ArgumentParser:
    """The options of a benchmark of steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=prompts, help=f"per step ({prompts})")
    parser.add_argument("--steps", type=int, default=12, help="of each system, behind its first (12)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    return parser
