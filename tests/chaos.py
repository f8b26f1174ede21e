"""Kills a random process of a run at a random instant, many times over: `make chaos`, or `python -m tests.chaos`.

Each seed chooses a victim (the actor's, critic's or reward's process, or the driver) and an instant of the training.
The run, with `trainer.max_restarts`, must end well, and its metrics must be those of an undisturbed run.
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
from pathlib import Path

from tests.runs import as_overrides, base_config, make_material, results

VICTIMS = {
    "actor": r"actor_rollout\+ref: \d+ workers on pool \w+ \(pid (\d+)\)",
    "critic": r"critic: \d+ workers on pool \w+ \(pid (\d+)\)",
    "reward": r"reward: \d+ workers on pool \w+ \(pid (\d+)\)",
    "driver": r"\(TaskRunner pid=(\d+)\)",
}
"""What the output says of the process id of each."""
LONGEST_SECONDS = 600


def start(material: Path, run_dir: Path) -> subprocess.Popen:
    settings = {
        "trainer__placement__name": "split",
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 40,
        "trainer__save_freq": 2,
        "trainer__test_freq": 10,
        "trainer__max_actor_ckpt_to_keep": 2,
        "trainer__max_critic_ckpt_to_keep": 2,
        "trainer__max_restarts": 2,
    }
    command = [sys.executable, "-m", "paceline.trainer.main_ppo"]
    command += as_overrides(base_config(material, run_dir, **settings))
    with Path(f"{run_dir}.txt").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(process: subprocess.Popen, file: Path, pattern: str) -> str:
    """The first group of the pattern, once it is in the file."""
    deadline = time.time() + LONGEST_SECONDS
    while time.time() < deadline and process.poll() is None:
        found = re.search(pattern, file.read_text()) if file.exists() else None
        if found:
            return found[1]
        time.sleep(0.02)
    raise TimeoutError(f"{pattern} did not come; the end of the output:\n{file.read_text()[-3000:]}")


def disturbed(material: Path, run_dir: Path, seed: int, seconds: float) -> str:
    """Run with one death; gives what happened."""
    dice = random.Random(seed)
    victim, share = dice.choice(sorted(VICTIMS)), dice.random()
    process = start(material, run_dir)
    output = Path(f"{run_dir}.txt")
    try:
        wait_for(process, output, r"(step 0/)")
        pid = int(wait_for(process, output, VICTIMS[victim]))
        time.sleep(share * seconds)
        step = len(results(run_dir)) - 1
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return f"{victim:<8} was gone before its turn"
        code = process.wait(timeout=LONGEST_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    restarts = output.read_text().count("starting again from")
    return f"{victim:<8} killed after step {step:>2}, {restarts} restart{'s' * (restarts != 1)}, exit code {code}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args(argv)
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material = make_material(folder / "material")
        process = start(material, folder / "undisturbed")
        wait_for(process, folder / "undisturbed.txt", r"(step 0/)")
        began = time.time()
        if process.wait(timeout=LONGEST_SECONDS):
            print((folder / "undisturbed.txt").read_text()[-3000:])
            return 1
        seconds = time.time() - began
        expected = results(folder / "undisturbed")
        print(f"undisturbed: {len(expected) - 1} steps in {seconds:.0f} s", flush=True)
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            run_dir = folder / f"seed{seed}"
            said = disturbed(material, run_dir, seed, seconds)
            same = results(run_dir) == expected
            failures += not same
            print(f"seed {seed:>3}: {said}, metrics {'equal' if same else 'DIFFER'}", flush=True)
            if not same:
                print(Path(f"{run_dir}.txt").read_text()[-5000:], flush=True)
    print(f"{arguments.seeds - failures} of {arguments.seeds} runs ended as the undisturbed one")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
