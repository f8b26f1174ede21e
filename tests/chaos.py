"""Kills or stops a process of a run at a random instant, many times over: `make chaos`, or `python -m tests.chaos`.

Each seed chooses a victim, a signal (SIGKILL or SIGSTOP) and an instant of the training. Victims are all processes of a
run: workers, the reward process, the driver, the launching process, and those of Ray itself. The run, with
`trainer.max_restarts`, must end well within the limit, its metrics must be those of an undisturbed run, and none of its
processes may be left. A launching process that was killed is started again by the same command; one that was stopped
goes on after a while, as after Ctrl-Z.
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

import psutil

from tests.runs import as_overrides, base_config, make_material, results

WORKERS = {"actor": "actor_rollout", "critic": "critic", "reward": "reward"}
"""Roles by what the driver's log calls them when it tells their process ids."""
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
VICTIMS = ("launcher", *WORKERS, *PROGRAMS)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STEPS = 24
HEARTBEAT_SECONDS = 20
PAUSE_SECONDS = 25
"""How long a stopped launching process stays so."""
LIMIT_SECONDS = 400
"""How long a disturbed run may take longer than an undisturbed one: to notice it, to start again, to repeat steps."""
LONGEST_SECONDS = 600


SETTINGS = {
    "trainer__placement__name": "split",
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 2,
    "trainer__test_freq": 10,
    "trainer__max_actor_ckpt_to_keep": 2,
    "trainer__max_critic_ckpt_to_keep": 2,
    "trainer__max_restarts": 2,
    "trainer__heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    "trainer__live_view": False,
}


def start(material: Path, run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline.trainer.main_ppo"]
    command += as_overrides(base_config(material, run_dir, **SETTINGS))
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
    def of(cls, seed: int) -> Strike:
        """Victims and signals in turn, so that some 30 seeds have all of them; the instant by chance."""
        kind, dice = seed % (len(VICTIMS) * len(SIGNALS)), random.Random(seed)
        name, number = VICTIMS[kind % len(VICTIMS)], SIGNALS[kind // len(VICTIMS)]
        return cls(name, number, dice.randrange(STEPS - 2), dice.random())


def disturbed(material: Path, run_dir: Path, strike: Strike, seconds: float) -> str:
    """A run with one disturbance; gives what happened. Raises if it does not end in time."""
    process = start(material, run_dir)
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
                assert_gone(processes, PAUSE_SECONDS)
                process = start(material, run_dir)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2 * len(VICTIMS))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--step", type=int, default=1, help="from seed to seed: another order of the victims")
    arguments = parser.parse_args(argv)
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material = make_material(folder / "material")
        process = start(material, folder / "undisturbed")
        wait_for_step(process, folder / "undisturbed", 0)
        began = time.time()
        if process.wait(timeout=LONGEST_SECONDS):
            print((folder / "undisturbed.txt").read_text()[-3000:])
            return 1
        seconds = time.time() - began
        expected = results(folder / "undisturbed")
        print(f"undisturbed: {len(expected) - 1} steps in {seconds:.0f} s", flush=True)
        for seed in range(arguments.first, arguments.first + arguments.step * arguments.seeds, arguments.step):
            run_dir = folder / f"seed{seed}"
            try:
                said = disturbed(material, run_dir, Strike.of(seed), seconds)
                same = results(run_dir) == expected
                said += f", metrics {'equal' if same else 'DIFFER'}"
            except (AssertionError, LookupError, subprocess.TimeoutExpired, TimeoutError) as error:
                said, same = f"{Strike.of(seed)}: {type(error).__name__}: {error}", False
            failures += not same
            print(f"seed {seed:>3}: {said}", flush=True)
            if not same:
                print(Path(f"{run_dir}.txt").read_text()[-5000:], flush=True)
    print(f"{arguments.seeds - failures} of {arguments.seeds} runs ended as the undisturbed one")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
