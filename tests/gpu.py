"""What to run on a machine with GPUs, and where its results go: `make test-gpu`.

    python -m tests.gpu [--output FOLDER]

Each part runs in a process of its own, goes on after a part that failed, and leaves its whole output in the folder.
`summary.txt` has a line for each. Without a GPU there is one line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SUITES = (
    "tests/contract/test_engine_contract.py",
    "tests/contract/test_rollout_contract.py",
    "tests/contract/test_vllm_sleep.py",
    "tests/contract/test_weight_proof.py",
    "tests/unit/engine/backends/test_own_model.py",
    "tests/unit/workers/test_role_worker.py",
    "tests/learn/test_rollout_engines.py",
    "tests/learn/test_packed_runs.py",
    "tests/learn/test_runs_in_process.py",
    "tests/ray/test_device_runs.py",
)
"""The files with tests that are marked `device`."""
HOURS = 3600


def parts(folder: Path, num_gpus: int) -> dict[str, list[str]]:
    """Name -> command."""
    python = sys.executable
    paceline = str(Path(python).with_name("paceline"))
    suites = {
        Path(suite).stem: [
            python,
            "-m",
            "pytest",
            "--device",
            "cuda",
            "--tb=long",
            f"--junitxml={folder}/{Path(suite).stem}.xml",
            suite,
        ]
        for suite in SUITES
    }
    quick = [paceline, "quickstart", "trainer.device=cuda"]
    split = {"quickstart_split": [*quick, "--placement", "split"]} if num_gpus > 1 else {}
    return {
        "doctor": [paceline, "doctor"],
        "nvidia_smi": ["nvidia-smi"],
        "packages": [python, "-m", "pip", "list"],
        **suites,
        "quickstart": quick,
        **split,
        "ppo_step": ["env", "BENCHMARK_DEVICE=cuda", python, "-m", "benchmarks.ppo_step"],
    }


def run(name: str, command: list[str], folder: Path) -> str:
    """Run a part; gives its line of the summary."""
    begin = time.monotonic()
    with (folder / f"{name}.txt").open("w") as output:
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=2 * HOURS, check=False
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            output.write(f"\n{error}\n")
            code = -1
    return f"{'ok    ' if code == 0 else 'FAILED'} {name} ({time.monotonic() - begin:.0f} s): {' '.join(command)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-report"))
    parser.add_argument("--check", action="store_true", help="only look for a GPU")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(f"make test-gpu: torch {torch.__version__} sees no GPU on this machine; nothing was run.")
        return 1
    if options.check:
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    folder = options.output.absolute()
    lines = []
    for name, command in parts(folder, torch.cuda.device_count()).items():
        lines.append(run(name, command, folder))
        print(lines[-1], flush=True)
        (folder / "summary.txt").write_text("\n".join(lines) + "\n")
    print(f"{folder}: all that docs/gpu.md asks for.")
    return int(any(line.startswith("FAILED") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
