from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.rollout import find_model
from paceline.errors import ConfigError


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


def test_steps_name_checkpoints_and_0_the_first_model(finished_run: Path) -> None:
    checkpoints = finished_run / "checkpoints"
    assert find_model(str(finished_run), 2).model == str(checkpoints / "global_step_2/actor")
    assert find_model(str(finished_run), None).model == str(checkpoints / "global_step_4/actor")
    assert find_model(str(checkpoints / "global_step_2"), None).model == str(checkpoints / "global_step_2/actor")
    assert find_model(str(finished_run), 0).model == str(finished_run.parent / "model")
    with pytest.raises(ConfigError, match="--step 4 is not the step of --model"):
        find_model(str(checkpoints / "global_step_2"), 4)
    with pytest.raises(ConfigError, match="no checkpoint of step 3; it has 2, 4"):
        find_model(str(finished_run), 3)
    with pytest.raises(ConfigError, match="is no folder of a run"):
        find_model(str(finished_run.parent / "model"), 3)


def test_checkpoints_that_were_set_aside_are_not_the_latest_and_can_be_named(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "global_step_4").rename(checkpoints / "global_step_4.1")
    assert find_model(str(tmp_path / "run"), None).model == str(checkpoints / "global_step_2/actor")
    aside = find_model(str(checkpoints / "global_step_4.1"), None)
    assert aside.model == str(checkpoints / "global_step_4.1/actor")
    assert aside.config.data.max_response_length == 8, "the run's"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "{there}/file"}, "There is no tokenizer at {there}/file: "),
        ({"--model": "{there}/empty"}, "There is no tokenizer at {there}/empty: "),
        ({"--output": "{there}/none/rows.jsonl"}, "--output {there}/none/rows.jsonl: there is no folder {there}/none."),
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


def test_a_run_without_checkpoints_says_how_to_get_them(finished_run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(finished_run / name, tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no checkpoint; it has none. trainer.save_freq saves them"):
        find_model(str(tmp_path), None)


def test_a_known_source_is_scored_without_a_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = finished_run.parent / "model", finished_run.parent / "test.parquet"
    text = rollout(capsys, "--model", model, "--data", data, "--limit", 1, "--max-tokens", 4)
    assert "score 0, ground truth" in text
