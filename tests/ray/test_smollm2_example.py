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
STEP = (
    "trainer.total_training_steps=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "ray_kwargs.ray_init.num_cpus=2",
)
SPLIT = ("trainer.n_gpus_per_node=2", "trainer.placement.name=split")


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a real model: minutes on two quiet cores
def test_a_prepared_model_answers_and_takes_a_step_of_grpo_and_ppo_in_both_placements(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "packages"),
    }

    def run(*command: str) -> None:
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=1400)

    lines = (EXAMPLE / "README.md").read_text().splitlines()
    [install] = [shlex.split(line) for line in lines if line.strip().startswith("pip install")]
    run(sys.executable, "-m", *install, "--quiet", "--target", "packages")
    run(sys.executable, str(EXAMPLE / "prepare.py"), "--output", ".", "--train", "32", "--test", "4")
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 32
    run("paceline", "rollout", "--model", "model", "--data", "test.parquet", "--limit", "2", "--max-tokens", "32")
    for algorithm in ("grpo", "ppo"):
        for placement, changes in {"colocated": (), "split": SPLIT}.items():
            run_dir = f"{algorithm}-{placement}"
            run(str(EXAMPLE / f"run_{algorithm}.sh"), ".", *STEP, *changes, f"trainer.default_local_dir={run_dir}")
            [line] = [line for line in read_metrics(tmp_path / run_dir) if line["step"] == 1]
            assert line["reward/extraction_failed_rate"] < 0.6  # it keeps the form that the prompt shows
            run("paceline", "report", run_dir)
