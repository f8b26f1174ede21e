"""`paceline quickstart` as a newcomer types it: PPO raises the accuracy in both placements, and PPO alone does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import read_metrics, results

LAST_LINE = re.compile(r"quickstart: accuracy (\d\.\d\d) -> (\d\.\d\d) in (\d+) steps \((.+)\)")


def quickstart(folder: Path, *arguments: str) -> tuple[float, float, int, Path]:
    """Run it; gives the accuracy before and after, the steps and the run folder, as its last line says."""
    command = [str(Path(sys.executable).with_name("paceline")), "quickstart", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = LAST_LINE.fullmatch(done.stdout.strip().splitlines()[-1])
    assert found, done.stdout
    return float(found[1]), float(found[2]), int(found[3]), folder / found[4]


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_ppo_raises_the_accuracy_alike_in_both_placements(tmp_path: Path) -> None:
    before, after, steps, colocated = quickstart(tmp_path)
    assert before <= 0.6
    assert after >= 0.9
    assert quickstart(tmp_path, "--placement", "split")[:3] == (before, after, steps)
    split = max((tmp_path / "runs" / "quickstart-split").iterdir())
    assert results(colocated) == results(split)


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_ppo_raises_the_accuracy_with_responses_that_are_four_updates_old(tmp_path: Path) -> None:
    ahead = ["trainer.schedule.name=pipelined", "trainer.schedule.max_staleness=4"]
    before, after, _, run = quickstart(tmp_path, *ahead, "actor_rollout_ref.actor.tis_imp_ratio_cap=2")
    assert before <= 0.6
    assert after >= 0.9
    assert read_metrics(run)[-1]["training/staleness/max"] == 4


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_at_learning_rate_zero_the_accuracy_stays(tmp_path: Path) -> None:
    before, after, _, _ = quickstart(
        tmp_path, "actor_rollout_ref.actor.optim.lr=0", "critic.optim.lr=0", "trainer.total_training_steps=10"
    )
    assert before <= 0.6
    # Validation asks the same sums with the same seeds, and the weights are the same.
    assert after == before


@pytest.mark.slow
def test_any_key_can_be_overridden(tmp_path: Path) -> None:
    keys = ["trainer.total_training_steps=2", "trainer.seed=11", "algorithm.adv_estimator=grpo"]
    _, _, steps, run = quickstart(tmp_path, *keys, "actor_rollout_ref.rollout.n=4", "data.train_batch_size=160")
    assert steps == 2
    assert "critic/vf_loss" not in read_metrics(run)[-1]
