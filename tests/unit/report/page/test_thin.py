"""A long run keeps its shape on a page of few points."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.report.page import write_page
from paceline.report.page.read import Limits
from tests.pages import data_in


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    with (tmp_path / "metrics.jsonl").open("w") as metrics, (tmp_path / "timeline.json").open("w") as timeline:
        for step in range(5_000):
            metrics.write(json.dumps({"step": step, **{f"m/{name}": step * 0.1234567 for name in range(20)}}) + "\n")
            args = {"pool": "p", "rank": 0, "role": "r", "step": step}
            timeline.write(json.dumps({"ph": "X", "name": "f", "ts": step * 1e6, "dur": 9e5, "args": args}) + ",\n")
    row = json.dumps({"kind": "training", "prompt": "p" * 100_000, "response": "r" * 100_000, "score": 1}) + "\n"
    for step in range(100):
        (tmp_path / f"samples/{step}.jsonl").write_text(row * 20)
    assert write_page([tmp_path], tmp_path / "report.html") < 4_000_000
    shown = data_in((tmp_path / "report.html").read_text())["runs"][0]
    assert len(shown["curves"]["series"]["m/0"][1]) == Limits().points
    assert shown["curves"]["steps"][0][-1] == 4_999
    assert shown["gantt"]["steps"][-1]["step"] == 4_999
    assert shown["samples"][-1]["step"] == 99
