from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.report.closing import closing_text


def write(folder: Path, *lines: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_last_words_are_the_best_score_and_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    accuracy = "val-core/own/acc/mean@1"
    run = write(
        tmp_path / "runs/my run", *({"step": step, accuracy: value} for step, value in enumerate([0.1, 0.9, 0.5]))
    )
    assert closing_text(run) == (
        "best validation: own/acc/mean@1 0.900 at step 1 of 2\nnext: paceline report 'runs/my run'\n"
    )


def test_without_validation_it_is_the_training_score(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {"step": 1, "critic/score/mean": 0.25}, {"step": 2, "critic/score/mean": "NaN"})
    assert closing_text(run) == f"best training score 0.250 at step 1 of 2\nnext: paceline report {run}\n"


def test_a_run_without_metrics_here_has_no_last_words(tmp_path: Path) -> None:
    assert closing_text(tmp_path) == ""
