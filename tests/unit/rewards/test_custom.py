"""Reward functions of the user's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.rewards import load_custom_reward
from paceline.rewards.scorer import Row

GOOD = """
from dataclasses import dataclass

@dataclass
class Bonus:
    value: float = 0.5

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + Bonus().value

def anything(**kwargs):
    return len(kwargs)
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_function_is_loaded_by_path_and_name(tmp_path):
    file = write(tmp_path / "rewards.py", GOOD)
    call = {"data_source": "x", "solution_str": "a", "ground_truth": "a", "extra_info": None}
    assert load_custom_reward(file)(**call) == 1.5
    assert load_custom_reward(str(file), "anything")(**call) == 4


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rewards.py", GOOD)
    assert callable(load_custom_reward("~/rewards.py"))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path=.*none\.py.*no such file"):
        load_custom_reward(tmp_path / "none.py")


def test_missing_function_suggests_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"'compute_scor'.*Did you mean compute_score.*anything"):
        load_custom_reward(write(tmp_path / "rewards.py", GOOD), "compute_scor")


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("solution_str, ground_truth", "data_source"),
        ("data_source, solution_str, ground_truth", "extra_info"),
        ("data_source, solution_str, ground_truth, extra_info, temperature", "temperature"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused_at_the_start(tmp_path, signature, problem):
    file = write(tmp_path / "rewards.py", f"def compute_score({signature}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=problem) as error:
        load_custom_reward(file)
    assert "compute_score(data_source, solution_str, ground_truth, extra_info)" in str(error.value)


def test_a_name_that_is_no_function_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a function, not int"):
        load_custom_reward(write(tmp_path / "rewards.py", "compute_score = 3\n"))


def test_a_file_that_fails_to_import_shows_its_error(tmp_path):
    with pytest.raises(ConfigError, match=r"importing it failed: ModuleNotFoundError.*no_such_package"):
        load_custom_reward(write(tmp_path / "rewards.py", "import no_such_package\n"))


def test_a_file_that_is_no_python_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a Python file"):
        load_custom_reward(write(tmp_path / "rewards.txt", GOOD))


def examples() -> list[str]:
    """The functions of docs/rewards.md, in order: one response, a batch, async."""
    page = Path(__file__).parents[3] / "docs" / "rewards.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [block for block in blocks if "def compute_score(" in block]


def test_the_first_example_of_the_documentation_runs(tmp_path):
    score = load_custom_reward(write(tmp_path / "my_reward.py", examples()[0]))
    call = {"data_source": "my/data", "ground_truth": "Paris", "extra_info": None}
    assert score(solution_str="<answer>Paris</answer>", **call) == {"score": 1.0, "acc": 1.0, "extracted": True}
    assert score(solution_str="<answer>Rome</answer>", **call) == {"score": 0.0, "acc": 0.0, "extracted": True}
    assert score(solution_str="It is Paris.", **call) == {"score": -0.1, "acc": 0.0, "extracted": False}


def test_the_batch_and_async_examples_of_the_documentation_run(tmp_path):
    _, batch, asynchronous = examples()
    rows = [Row("s", "42", "42", {"question": "6 * 7"}), Row("s", "it is 41", "42", {"question": "6 * 7"})]
    assert load_custom_reward(write(tmp_path / "one.py", batch)).grade(rows) == pytest.approx([1.0, -0.006])
    assert load_custom_reward(write(tmp_path / "two.py", asynchronous)).grade(rows) == [1.0, 0.0]


def test_arguments_of_the_configuration_are_part_of_the_signature(tmp_path):
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):\n    return bonus\n"
    file = write(tmp_path / "rewards.py", text)
    assert load_custom_reward(file, reward_kwargs={"bonus": 0.5}).grade([Row("s", "a", "", None)]) == [0.5]
    with pytest.raises(ConfigError, match="missing a required argument: 'bonus'"):
        load_custom_reward(file)
    with pytest.raises(ConfigError, match=r"extra_info, bonu\) for one response.*bonu: from custom_reward_function"):
        load_custom_reward(file, reward_kwargs={"bonu": 0.5})


def test_a_file_that_has_changed_is_loaded_anew(tmp_path):
    file = write(tmp_path / "rewards.py", "def compute_score(**kwargs):\n    return 1.0\n")
    assert load_custom_reward(file)() == 1.0
    write(file, "def compute_score(**kwargs):\n    return 2.0\n")
    os.utime(file, ns=(1, 1))
    assert load_custom_reward(file)() == 2.0
