"""`external_lib`: a user's module is known in every process of a run, without a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import as_overrides, base_config, make_material, read_metrics, write_sums

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
SCORER = """
from paceline.rewards import register_scorer


def digits(solution_str, ground_truth, extra_info=None):
    return float(sum(character.isdigit() for character in solution_str))


register_scorer("mine/digits", digits)
"""


@pytest.mark.slow
def test_the_module_of_the_page_trains_with_its_estimator_its_loss_and_a_scorer(tmp_path: Path) -> None:
    material = make_material(tmp_path)
    code = PAGE.read_text().split("Write a file, `mine.py`:\n\n```python\n")[1].split("```")[0]
    (tmp_path / "mine.py").write_text(code + SCORER)
    for name, rows in (("train", 8), ("test", 4)):
        write_sums(tmp_path / f"{name}.parquet", rows, source="mine/digits")
    config = base_config(material, tmp_path / "run", trainer__total_training_steps=2)
    del config["custom_reward_function.path"]
    named = PAGE.read_text().split("and name it, with what it registers:\n\n")[1].split("\n\n")[0].split()
    command = [sys.executable, "-m", "paceline.trainer.main_ppo", *as_overrides(config), *named]
    command.append("reward_model.timeout_seconds=60")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == 2
    assert any(name.startswith("val-core/mine/digits/") for name in lines[0])
