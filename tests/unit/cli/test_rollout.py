from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli.rollout import find_model, read_prompts
from paceline.config import PPOConfig
from paceline.data import rl_dataset
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import CheckpointError, ConfigError
from paceline.trainer.ppo.checkpoint import begin_checkpoint, complete_checkpoint
from tests.runs import make_material


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


def test_a_run_without_checkpoints_says_how_to_get_them(finished_run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(finished_run / name, tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no checkpoint; it has none. trainer.save_freq saves them"):
        find_model(str(tmp_path), None)


def test_a_known_source_is_scored_without_a_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = finished_run.parent / "model", finished_run.parent / "test.parquet"
    text = rollout(capsys, "--model", model, "--data", data, "--limit", 1, "--max-tokens", 4)
    assert "score 0, ground truth" in text


def test_a_secret_that_the_reward_needs_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run saves *** for it, which would go to the function as if it were the key."""
    folder = begin_checkpoint(tmp_path / "checkpoints", 2)
    (folder / "actor").mkdir()
    (folder / "actor/config.json").touch()
    complete_checkpoint(folder, {"global_step": 2})
    saved = tmp_path / "config.yaml"
    reward = "custom_reward_function: {path: reward.py, reward_kwargs: {judge: {api_key: VALUE}, url: 'http://a'}}\n"
    unused = "ray_kwargs: {ray_init: {runtime_env: {env_vars: {HF_TOKEN: '***'}}}}\n"
    saved.write_text(reward.replace("VALUE", "'***'") + unused)
    with pytest.raises(ConfigError) as caught:
        find_model(str(tmp_path), None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"custom_reward_function.reward_kwargs.judge.api_key is *** in {saved}: ")
    assert "Write ${oc.env:NAME} there" in problem

    saved.write_text(reward.replace("VALUE", "'${oc.env:JUDGE_KEY}'") + unused)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        find_model(str(tmp_path), None)
    monkeypatch.setenv("JUDGE_KEY", "abc")
    given = find_model(str(tmp_path), None).config.custom_reward_function.reward_kwargs
    assert given == {"judge": {"api_key": "abc"}, "url": "http://a"}


def test_prompts_take_no_more_memory_than_the_longest_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    material = make_material(tmp_path)
    tokenizer = load_tokenizer(str(material / "model"))
    collated: list[dict[str, Any]] = []
    collate = rl_dataset.collate_fn
    monkeypatch.setattr(rl_dataset, "collate_fn", lambda rows: collated.extend(rows) or collate(rows))
    names = ("input_ids", "attention_mask", "position_ids")
    for asked in ({"data": str(material / "test.parquet"), "limit": 6}, {"data": None, "prompt": ["1+1=", "12345+1="]}):
        collated.clear()
        batch = read_prompts(Namespace(**asked), PPOConfig(), tokenizer)
        lengths = batch["attention_mask"].sum(dim=-1)
        width = int(lengths.max())
        assert int(lengths.min()) < width
        assert {row[name].untyped_storage().nbytes() for row in collated for name in names} == {8 * width}
        for row, length in zip(range(len(lengths)), lengths.tolist(), strict=True):
            padding = width - length
            assert batch["input_ids"][row, :padding].tolist() == [tokenizer.pad_token_id] * padding
            assert batch["attention_mask"][row].tolist() == [0] * padding + [1] * length
            assert batch["position_ids"][row].tolist() == [0] * padding + list(range(length))
