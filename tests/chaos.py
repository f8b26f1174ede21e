"""Kills or stops a process of a run at a random instant, many times over: `make chaos`, or `python -m tests.chaos`.

Each seed chooses a victim, a signal (SIGKILL or SIGSTOP) and an instant of the training. Victims are all processes of a
run: workers, the reward process, the driver, the launching process, and those of Ray itself. The run, with
`trainer.max_restarts`, must end well within the limit, its metrics and its ledger must be those of an undisturbed run,
and none of its processes may be left. A launching process that was killed is started again by the same command; one
that was stopped goes on after a while, as after Ctrl-Z.

There are three kinds of runs: `sync` on two pools; `pipelined`, whose rollout is ahead of the training on a third; and
`streaming`, whose numbers depend on time, so that the ledger alone is compared.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.runs import as_overrides, base_config, make_material, results

WORKERS = {"actor": r"\bactor", "rollout": r"\brollout", "critic": "critic", "reward": "reward"}
"""Roles by what the driver's log calls them when it tells their process ids; in `sync` the actor is the rollout."""
PROGRAMS = {
    "driver": "ray::TaskRunner",
    "gcs_server": "gcs/gcs_server",
    "raylet": "raylet/raylet",
    "log_monitor": "log_monitor.py",
    "dashboard": "dashboard/dashboard.py",
    "autoscaler": "autoscaler/_private/monitor.py",
    "dashboard_agent": "ray::DashboardAgent",
    "runtime_env_agent": "ray::RuntimeEnvAgent",
}
"""Other processes by a part of their command line."""
VICTIMS = {
    "sync": ("launcher", "actor", "critic", "reward", *PROGRAMS),
    "pipelined": ("launcher", *WORKERS, "driver", "gcs_server", "raylet"),
    "streaming": ("launcher", *WORKERS, "driver"),
}
"""Of each kind of run. Ray's helpers are all among those of the first."""
SEEDS = {"sync": 2 * len(VICTIMS["sync"]), "pipelined": 20, "streaming": 20}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STEPS = 24
HEARTBEAT_SECONDS = 20
AGENT_SECONDS = 90
"""How long Ray's two agents may outlive it: for a minute they try to tell its gcs_server that its raylet has ended."""
PAUSE_SECONDS = 25
"""How long a stopped launching process stays so."""
LIMIT_SECONDS = 400
"""How long a disturbed run may take longer than an undisturbed one: to notice it, to start again, to repeat steps."""
LONGEST_SECONDS = 600


SETTINGS = {
    "trainer__placement__name": "split",
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 2,
    "trainer__test_freq": 10,
    "trainer__max_actor_ckpt_to_keep": 2,
    "trainer__max_critic_ckpt_to_keep": 2,
    "trainer__max_restarts": 2,
    "trainer__heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    "trainer__live_view": False,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "sync": {"trainer__n_gpus_per_node": 2},
    "pipelined": {
        "trainer__n_gpus_per_node": 3,
        "trainer__cpus_per_device": 0.5,
        "trainer__placement__rollout_devices": 1,
        "trainer__schedule__name": "pipelined",
        "trainer__schedule__max_staleness": 2,
    },
}
OF_KIND["streaming"] = OF_KIND["pipelined"] | {"trainer__schedule__name": "streaming"}


def start(kind: str, material: Path, run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline.trainer.main_ppo"]
    command += as_overrides(base_config(material, run_dir, **SETTINGS, **OF_KIND[kind]))
    with Path(f"{run_dir}.txt").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    """Wait for the line of a step; that of 0 is the validation before the first."""
    deadline = time.time() + LONGEST_SECONDS
    while time.time() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and len(results(run_dir)) > step:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no step {step}; the end of the output:\n{Path(f'{run_dir}.txt').read_text()[-3000:]}")


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """All processes of a run, and of no other: the launching process and its descendants."""
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


def find(victim: str, processes: list[psutil.Process], run_dir: Path) -> psutil.Process:
    if victim == "launcher":
        return processes[0]
    if victim in WORKERS:
        log = (run_dir / "logs" / "driver.log").read_text()
        pid = int(re.findall(rf"{WORKERS[victim]}\S*: \d+ workers on pool \S+ \(pid (\d+)", log)[-1])
        return next(process for process in processes if process.pid == pid)
    for process in processes:
        if PROGRAMS[victim] in " ".join(process.cmdline()):
            return process
    raise LookupError(f"{victim} is not among {[' '.join(process.cmdline())[:100] for process in processes]}")


@dataclass(frozen=True)
class Strike:
    """What is done to which process, in which step, and how many seconds after the step began."""

    victim: str
    signal: signal.Signals
    step: int
    seconds: float

    @classmethod
    def of(cls, seed: int, victims: Sequence[str]) -> Strike:
        """Victims and signals in turn, so that twice as many seeds have all of them; the instant by chance."""
        turn, dice = seed % (len(victims) * len(SIGNALS)), random.Random(seed)
        name, number = victims[turn % len(victims)], SIGNALS[turn // len(victims)]
        return cls(name, number, dice.randrange(STEPS - 2), dice.random())


def disturbed(kind: str, material: Path, run_dir: Path, strike: Strike, seconds: float) -> str:
    """A run with one disturbance; gives what happened. Raises if it does not end in time."""
    process = start(kind, material, run_dir)
    processes: list[psutil.Process] = []
    try:
        wait_for_step(process, run_dir, strike.step)
        time.sleep(strike.seconds)
        processes = family(process)
        step = len(results(run_dir)) - 1
        find(strike.victim, processes, run_dir).send_signal(strike.signal)
        struck = time.time()
        if strike.victim == "launcher":
            if strike.signal is signal.SIGSTOP:
                time.sleep(PAUSE_SECONDS)
                process.send_signal(signal.SIGCONT)
            else:
                process.wait()
                assert_gone(processes, AGENT_SECONDS)
                process = start(kind, material, run_dir)
        code = process.wait(timeout=seconds + LIMIT_SECONDS)
        took = time.time() - struck
        assert_gone(processes, 20)
    except psutil.NoSuchProcess:
        return f"{strike.victim} was gone before its turn"
    finally:
        for each in processes:
            if each.is_running():
                each.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    restarts = Path(f"{run_dir}.txt").read_text().count("starting again from")
    what = f"{strike.victim} {strike.signal.name} after step {step}"
    return f"{what:<42} {restarts} restart{'s' * (restarts != 1)}, end {took:.0f} s later with exit code {code}"


def assert_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise AssertionError(f"left behind: {[(process.pid, process.name(), process.status()) for process in left]}")


def records(kind: str, run_dir: Path) -> tuple[list[Any], bytes]:
    """What must be as in an undisturbed run: the metrics, and what became of each prompt."""
    lines = results(run_dir)
    compared = [line["step"] for line in lines] if kind == "streaming" else lines
    return compared, (run_dir / "ledger.jsonl").read_bytes()


def all_of(kind: str, seeds: Sequence[int], folder: Path) -> int:
    """An undisturbed run of this kind, and one for each seed; gives how many were not like it."""
    material, failures = make_material(folder / "material"), 0
    process = start(kind, material, folder / "undisturbed")
    wait_for_step(process, folder / "undisturbed", 0)
    began = time.time()
    if process.wait(timeout=LONGEST_SECONDS):
        print((folder / "undisturbed.txt").read_text()[-3000:])
        return len(seeds)
    seconds = time.time() - began
    expected = records(kind, folder / "undisturbed")
    print(f"{kind}, undisturbed: {len(expected[0]) - 1} steps in {seconds:.0f} s", flush=True)
    for seed in seeds:
        run_dir = folder / f"seed{seed}"
        strike = Strike.of(seed, VICTIMS[kind])
        try:
            said = disturbed(kind, material, run_dir, strike, seconds)
            same = records(kind, run_dir) == expected
            compared = "steps and ledger" if kind == "streaming" else "metrics and ledger"
            said += f", {compared} {'equal' if same else 'DIFFER'}"
        except (AssertionError, LookupError, subprocess.TimeoutExpired, TimeoutError) as error:
            said, same = f"{strike}: {type(error).__name__}: {error}", False
        failures += not same
        print(f"{kind}, seed {seed:>3}: {said}", flush=True)
        if not same:
            print(Path(f"{run_dir}.txt").read_text()[-5000:], flush=True)
    print(f"{kind}: {len(seeds) - failures} of {len(seeds)} runs ended as the undisturbed one", flush=True)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(OF_KIND), help="of runs; all without")
    parser.add_argument("--seeds", type=int, help=f"how many; {SEEDS} without")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--step", type=int, default=1, help="from seed to seed: another order of the victims")
    arguments = parser.parse_args(argv)
    failures = 0
    for kind in [arguments.kind] if arguments.kind else list(OF_KIND):
        count = SEEDS[kind] if arguments.seeds is None else arguments.seeds
        seeds = range(arguments.first, arguments.first + arguments.step * count, arguments.step)
        with tempfile.TemporaryDirectory() as name:
            failures += all_of(kind, seeds, Path(name))
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
