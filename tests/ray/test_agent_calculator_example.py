"""The example as a newcomer types it: a model that could not add learns to let a calculator do it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import read_metrics

ROOT = Path(__file__).resolve().parents[2]
LAST_LINE = re.compile(r"agent_calculator: success (\d\.\d\d) -> (\d\.\d\d) in (\d+) steps \((.+)\)")
SPLIT = ("trainer.placement.name=split", "trainer.n_gpus_per_node=2")
STILL = ("actor_rollout_ref.actor.optim.lr=0", "critic.optim.lr=0", "trainer.total_training_steps=5")


def example(folder: Path, *arguments: str) -> tuple[float, float, Path]:
    """Run it; gives success before and after, and the run folder, as its last line says."""
    command = [sys.executable, str(ROOT / "examples/agent_calculator/main.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = LAST_LINE.fullmatch(done.stdout.strip().splitlines()[-1])
    assert found, done.stdout
    return float(found[1]), float(found[2]), Path(found[4])


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("placement", [(), SPLIT], ids=["colocated", "split"])
def test_a_model_learns_to_call_a_calculator_in_both_placements(tmp_path: Path, placement: tuple[str, ...]) -> None:
    before, after, run = example(tmp_path, *placement)
    assert before <= 0.3
    assert after >= 0.9
    lines = read_metrics(run)
    assert lines[-1]["agent/tool_calls"] > 3 * lines[1]["agent/tool_calls"]


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_at_learning_rate_zero_it_stays(tmp_path: Path) -> None:
    before, after, _ = example(tmp_path, *STILL)
    assert before <= 0.3
    assert after == pytest.approx(before, abs=0.011)  # the last bits of logits may choose other tokens
