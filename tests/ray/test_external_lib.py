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


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.trainer.main_ppo", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300)


def page_settings() -> list[str]:
    block = PAGE.read_text().split("and name it, with what it registers:\n\n")[1].split("\n\n")[0]
    return block.split()


@pytest.mark.slow
def test_the_module_of_the_page_trains_with_its_estimator_its_loss_and_a_scorer(tmp_path: Path) -> None:
    material = make_material(tmp_path)
    code = PAGE.read_text().split("Write a file, `mine.py`:\n\n```python\n")[1].split("```")[0]
    (tmp_path / "mine.py").write_text(code + SCORER)
    for name, rows in (("train", 8), ("test", 4)):
        write_sums(tmp_path / f"{name}.parquet", rows, source="mine/digits")
    config = base_config(material, tmp_path / "run", trainer__total_training_steps=2)
    del config["custom_reward_function.path"]
    done = train(tmp_path, *as_overrides(config), *page_settings(), "reward_model.timeout_seconds=60")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == 2
    assert any(name.startswith("val-core/mine/digits/") for name in lines[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.py can't be imported: FileNotFoundError"),
        (
            "import nothing_of_this_name",
            "can't be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("def", "can't be imported: SyntaxError"),
        ("x = 1", "algorithm.adv_estimator='reward_to_go' is not known"),
    ],
)
def test_a_module_that_fails_or_does_not_register_is_told_with_the_other_problems(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    done = train(tmp_path, *page_settings(), "trainer.nnodes=0")
    assert done.returncode == 2
    assert message in done.stderr
    assert "trainer.nnodes=0 is out of range" in done.stderr
    assert "Traceback" not in done.stderr
