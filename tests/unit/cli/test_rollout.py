from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import CheckpointError
from paceline.trainer.saved_policy import find_model


def rollout(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["rollout", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_prompt_is_answered_by_a_model_folder(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = finished_run.parent / "model"
    asked = ("--model", model, "--prompt", "1+1=", "--max-tokens", 5)
    text = rollout(capsys, *asked, "-n", 2)
    assert "user: 1+1=" in text
    assert "--- 2/2" in text
    assert "no rule" in text
    greedy = rollout(capsys, *asked, "--temperature", 0, "--seed", 1)
    assert greedy.splitlines()[:-1] == rollout(capsys, *asked, "--temperature", 0, "--seed", 2).splitlines()[:-1]


def test_a_runs_latest_checkpoint_answers_its_data_and_is_scored_by_its_rule(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = finished_run.parent / "test.parquet", tmp_path / "rows.jsonl"
    text = rollout(capsys, "--model", finished_run, "--data", data, "--limit", 3, "-n", 2, "--output", file)
    assert "6 responses, mean score" in text
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:  # the run's own reward: the share of digits
        digits = sum(character.isdigit() for character in row["response"])
        assert row["score"] == pytest.approx(digits / max(1, len(row["response"])))
        assert row["tokens"] <= 8, "the run's data.max_response_length"
        assert row["data_source"] == "openai/gsm8k"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "{there}/file"}, "There is no tokenizer at {there}/file: "),
        ({"--model": "{there}/empty"}, "There is no tokenizer at {there}/empty: "),
        ({"--output": "{there}/none/rows.jsonl"}, "--output {there}/none/rows.jsonl: there is no folder {there}/none."),
        ({"--output": "{there}/empty"}, "--output {there}/empty is a folder. Give a file in it."),
    ],
)
def test_what_can_not_be_read_or_written_is_told_before_anything_is_sampled(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    asked = {"--model": str(finished_run.parent / "model"), "--prompt": "1+1=", **changes}
    words = [word.format(there=tmp_path) for pair in asked.items() for word in pair]
    with pytest.raises(SystemExit):
        cli.main(["rollout", *words])
    shown = capsys.readouterr()
    assert message.format(there=tmp_path) in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_damaged_checkpoint_is_not_sampled_from(
    finished_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte of the weights is another: the model can still be read."""
    shutil.copytree(finished_run, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"

    def damage(step: int) -> None:
        weights = checkpoints / f"global_step_{step}/actor/model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    damage(4)
    wrong = r"global_step_4/actor/model\.safetensors was changed: its sha256 is not the one it was written with"
    for asked in ((str(tmp_path / "run"), 4), (str(checkpoints / "global_step_4"), None)):
        with pytest.raises(CheckpointError, match=wrong):
            find_model(*asked)
    assert find_model(str(tmp_path / "run"), None).model == str(checkpoints / "global_step_2/actor")
    assert "global_step_4/actor/model.safetensors was changed" in caplog.text
    damage(2)
    with pytest.raises(SystemExit) as ended:
        cli.main(["rollout", "--model", str(tmp_path / "run"), "--prompt", "1+1="])
    assert ended.value.code == 1
    assert "has no whole actor to read: global_step_4/actor/model.safetensors was changed" in capsys.readouterr().err


def test_a_known_source_is_scored_without_a_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = finished_run.parent / "model", finished_run.parent / "test.parquet"
    text = rollout(capsys, "--model", model, "--data", data, "--limit", 1, "--max-tokens", 4)
    assert "score 0, ground truth" in text
