from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import cli


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    if code:
        with pytest.raises(SystemExit) as ended:
            cli.main(["eval", *map(str, arguments)])
        assert ended.value.code == code
        return capsys.readouterr().err
    assert cli.main(["eval", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_model_is_measured_and_the_folder_has_a_page(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = finished_run.parent / "model", finished_run.parent / "test.parquet"
    asked = ("--model", model, "--data", data, "--limit", 4, "-n", 2, "--max-tokens", 3)
    text = evaluate(capsys, *asked)
    folder = Path("runs/eval/model-test")
    assert text.splitlines()[-1].startswith("eval: openai/gsm8k/acc ")
    assert text.splitlines()[-1].endswith(f" on 4 prompts ({folder})")
    assert "openai/gsm8k/acc/pass@2" in text
    assert (folder / "report.html").is_file()
    assert evaluate(capsys, *asked) == text, "the second time, all is there already"
    assert "another question: n was 2, is 1" in evaluate(capsys, *asked, "-n", 1, code=2)


def test_a_run_and_the_model_it_began_with_have_folders_of_their_own_and_its_rewards(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("--model", finished_run, "--data", finished_run.parent / "test.parquet", "--limit", 3)
    evaluate(capsys, *asked)
    evaluate(capsys, *asked, "--step", 0)
    name = finished_run.name
    folders = [tmp_path / f"runs/eval/{name}-step{step}-test" for step in (0, 4)]
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
        assert len(rows) == 3
        for row in rows:  # the run's own reward: the share of digits
            digits = sum(character.isdigit() for character in row["response"])
            assert row["score"] == pytest.approx(digits / max(1, len(row["response"])))
    assert cli.main(["report", *map(str, folders), "--output", "compare.html"]) == 0
    assert "step=0" in (tmp_path / "compare.html").read_text()


def test_k_above_n_is_refused(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = finished_run.parent / "model", finished_run.parent / "test.parquet"
    text = evaluate(capsys, "--model", model, "--data", data, "-n", 2, "--k", 1, 4, code=2)
    assert "--k 4 is more than -n 2: pass@k needs at least k responses" in text
