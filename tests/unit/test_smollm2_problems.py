"""The problems of examples/smollm2_gsm8k and of the recipes with its model."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from paceline.cli import smollm2_material as prepare
from paceline.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2_gsm8k"


@pytest.fixture
def model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "gguf_folder", lambda: Path())
    monkeypatch.setattr(prepare, "convert_model", lambda source, folder: None)


def questions(file: Path) -> list[str]:
    return [row["question"] for row in pq.read_table(file).column("extra_info").to_pylist()]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_problem_to_validate_on_is_one_to_train_on(model_is_there: None, tmp_path: Path, seed: int) -> None:
    prepare.main(["--output", str(tmp_path), "--seed", str(seed), "--test", "640"])
    train, test = questions(tmp_path / "train.parquet"), questions(tmp_path / "test.parquet")
    assert (len(train), len(test)) == (2000, 640)
    assert not set(train) & set(test)


def test_the_problems_to_train_on_are_those_of_the_documented_runs() -> None:
    problems = prepare.make_problems("train", 2000, seed=0, largest=20)
    digest = hashlib.sha256("".join(problem["question"] + problem["answer"] for problem in problems).encode())
    assert digest.hexdigest() == "29bc4b8892a613895010e246bef293c7fd050db22912b46631e1f9008282fe10"


def test_questions_that_do_not_suffice_are_told(
    model_is_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "NAMES", ("Anna",))
    monkeypatch.setattr(prepare, "THINGS", ("eggs",))
    with pytest.raises(ConfigError, match="--test 64: there are too few other questions"):
        prepare.main(["--output", str(tmp_path), "--largest", "2"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--largest", "1", "argument --largest: 1 is too small: it takes 2 or more"),
        ("--train", "0", "argument --train: 0 is too small: it takes 1 or more"),
        ("--test", "-3", "argument --test: -3 is too small: it takes 1 or more"),
        ("--test", "many", "argument --test: invalid number value: 'many'"),
    ],
)
def test_a_number_that_gives_no_problems_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        prepare.main(["--output", str(tmp_path / "new"), option, value])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("script", ["run_grpo.sh", "run_ppo.sh"])
def test_a_script_without_a_folder_says_what_it_takes(script: str) -> None:
    path = EXAMPLE / script
    done = subprocess.run([str(path)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"usage: {script} FOLDER [key=value ...]" in done.stderr


def test_pairs_are_the_solution_and_one_with_a_wrong_result() -> None:
    pair = prepare._compared({"question": "How many?", "answer": "4 + 5 = 9\n#### 9"})
    assert (pair["chosen"], pair["rejected"]) == ("4 + 5 = 9\n#### 9", "4 + 5 = 10\n#### 10")
    assert pair["prompt"][-1] == {"role": "user", "content": "How many?"}


def test_the_material_of_recipes(model_is_there: None, tmp_path: Path) -> None:
    prepare.make_smollm2(tmp_path / "material")
    assert {file.name: pq.read_metadata(file).num_rows for file in (tmp_path / "material").iterdir()} == {
        **dict.fromkeys(("train.parquet", "chats.parquet", "pairs.parquet"), 2000),
        **dict.fromkeys(("test.parquet", "held_out_chats.parquet", "held_out_pairs.parquet"), 64),
    }
