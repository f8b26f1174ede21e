"""`paceline runs` and `paceline diff` on folders as runs leave them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.cli.diff import main as diff
from paceline.cli.runs import main as runs
from paceline.protocol import DataProto
from paceline.report.bundles import write_bundle


def make_run(folder: Path, scores: list[float], state: str = "finished", updated: float | None = None) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "critic/score/mean": score, "val-core/gsm8k/acc": score / 2, "timing_s/step": time.time()}
        for step, score in enumerate(scores, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": state, "step": len(scores), "total_steps": 9, "updated": updated or time.time(), "started": 1.0}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def test_runs_are_listed_with_state_score_and_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a" / "first", [0.1, 0.6, 0.2])
    make_run(tmp_path / "a" / "second", [0.3], state="running", updated=time.time() - 100)
    (tmp_path / "a" / "first" / "checkpoints").mkdir()
    assert runs([str(tmp_path), "--plain"]) == 0
    head, *lines = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "state", "step", "best score", "age"]
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name["a/first"][:3] == ["finished", "3/9", "0.300 (gsm8k/acc)"]
    assert by_name["a/second"][:2] == ["killed", "1/9"]
    with pytest.raises(SystemExit):
        runs([str(tmp_path / "a" / "first" / "checkpoints")])
    assert "there are no runs in" in capsys.readouterr().err


def test_equal_runs_are_equal_but_for_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(make_run(tmp_path / name, [0.1, 0.2])) for name in "ab"]
    assert diff(folders) == 0
    assert capsys.readouterr().out.startswith("diff: equal in the steps 1 to 2")


def test_the_first_metric_and_the_first_value_that_differ_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make_run(tmp_path / name, [0.1, score, score]) for name, score in (("a", 0.2), ("b", 0.25))]
    assert diff([str(folder) for folder in folders]) == 1
    assert capsys.readouterr().out == "diff: step 2, critic/score/mean: first run 0.2, second run 0.25\n"
    for folder, value in zip(folders, (0.5, 0.75), strict=True):
        columns = DataProto.from_dict(
            {"responses": torch.ones(2, 3), "advantages": torch.tensor([[0.0, 0.0, 0.0], [0.0, value, 1.0]])},
            {"uid": np.array(["a", "b"], dtype=object)},
        )
        write_bundle(folder / "records" / "step_2", {"step": 2, "updates": {}}, columns, {})
    assert diff([str(folder) for folder in folders]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("diff: step 2, advantages, row 1, token 1: first run 0.5, second run 0.75 (1 of 6 differ)")
