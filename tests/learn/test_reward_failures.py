"""Reward functions that hang, raise or give nonsense, in real small runs: counted, and fatal only if asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RewardError
from tests.in_process import train_in_process
from tests.runs import base_config, make_material, read_metrics

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    index = extra_info["index"]
    if index == 3:
        while True:
            time.sleep(1)
    if index == 5:
        raise ConnectionError("the judge is down")
    return {7: float("nan"), 9: "<html>502</html>", 11: [1.0, 2.0], 13: {"points": 1}}.get(index, 1.0)
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_material(tmp_path_factory.mktemp("material"))
    (folder / "reward.py").write_text(REWARD)
    return folder


def settings(material: Path, run_dir: Path, **changes: object) -> dict:
    return base_config(
        material,
        run_dir,
        algorithm__adv_estimator="remax",
        data__val_files=None,
        trainer__total_training_steps=3,  # an epoch: 20 prompts in batches of 8
        reward_model__timeout_seconds=2,
        **changes,
    )


def test_failures_are_counted_in_sampled_and_in_greedy_responses(material: Path, tmp_path: Path) -> None:
    train_in_process(settings(material, tmp_path / "run"))
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name, count in {"grader_errors": 6, "grader_timeouts": 1}.items():
        assert sum(line[f"reward/{name}"] for line in lines) == count
        assert sum(line[f"reward/baseline_{name}"] for line in lines) == count


def test_the_first_failure_is_fatal_if_asked(material: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"Grading failed for \d of 8 responses"):
        train_in_process(settings(material, tmp_path / "run", reward_model__on_error="raise"))
