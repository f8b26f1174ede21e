"""What the page reads of a run's folder, also of one that was killed, damaged or begun again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.report.page import gantt
from paceline.report.page.build import page_data, render
from paceline.report.page.read import Limits, read_run, summarize
from tests.pages import data_in


def test_curves_have_the_values_of_the_metrics(finished_run: Path) -> None:
    curves = read_run(finished_run, "run", Limits())["curves"]
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    place, values = curves["series"]["critic/score/mean"]
    assert curves["steps"][place] == [1, 2, 3, 4]
    assert values == pytest.approx([line["critic/score/mean"] for line in lines[1:]], rel=1e-5)
    place, _ = curves["series"]["val-core/openai/gsm8k/reward/mean@1"]
    assert curves["steps"][place] == [0, 2, 4]


def test_a_run_that_was_started_anew_shows_nothing_of_the_one_before(tmp_path: Path) -> None:
    for name, rank in (("timeline.1.json", 3), ("timeline.json", 0)):
        events = [
            {"ph": "X", "name": "update_actor", "ts": step * 1e6, "dur": 5e5}
            | {"args": {"pool": "p", "rank": rank, "role": f"role {rank}", "step": step}}
            for step in range(1, 5 if rank else 3)
        ]
        (tmp_path / name).write_text("{\n" + ",\n".join(map(json.dumps, events)) + "\n]}")
    shown = gantt.read_gantt(tmp_path, [1, 2], 10)
    assert shown["pools"] == {"p": {"processes": 1, "roles": ["role 0"]}}


def test_what_differs_from_the_defaults_is_told(finished_run: Path) -> None:
    rows = {row[0]: row[1:] for row in read_run(finished_run, "run", Limits())["config"]}
    assert rows["trainer.placement.name"] == ("split", "colocated", True)
    assert rows["trainer.nnodes"] == ("1", "1", False)
    assert rows["ray_kwargs.ray_init"] == ("{}", "{}", False)


def test_a_run_that_was_killed_has_a_page(finished_run: Path, tmp_path: Path) -> None:
    """Every file of it cut at any place, and then all but the metrics gone."""
    for share in (0.9, 0.5, 0.1):
        run = tmp_path / str(share)
        shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
        for path in (path for path in run.rglob("*") if path.is_file()):
            content = path.read_bytes()
            path.write_bytes(content[: int(len(content) * share)])
        shown = data_in(render(page_data([run])))["runs"][0]
        assert shown["summary"]
    for path in run.iterdir():
        if path.name != "metrics.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert data_in(render(page_data([run])))["runs"][0]["gantt"]["steps"] == []


def test_not_finite_values_are_gaps(tmp_path: Path) -> None:
    lines = [{"step": 1, "a": "NaN", "b": 1.0}, {"step": 2, "a": 2.0, "b": "Infinity"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = data_in(render(page_data([tmp_path])))["runs"][0]["curves"]
    assert curves["series"]["a"][1] == [None, 2.0]
    assert curves["series"]["b"][1] == [1.0, None]


def test_metrics_that_can_not_be_read_are_counted_on_the_page(finished_run: Path, tmp_path: Path) -> None:
    lines = (finished_run / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(f"not json\n{lines}half a li")
    summary = dict(read_run(tmp_path, "run", Limits())["summary"])
    assert summary["unreadable"] == "1 lines of metrics.jsonl"
    assert "unreadable" not in dict(read_run(finished_run, "run", Limits())["summary"])


def test_a_run_whose_scores_are_all_nan_has_a_page(tmp_path: Path) -> None:
    lines = [{"step": step, "critic/score/mean": "NaN"} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = dict(read_run(tmp_path, "run", Limits())["summary"])
    assert summary["steps"] == "2"
    assert "training score" not in summary


def test_a_checkpoint_may_vanish_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on removes old ones."""
    for step in (2, 4):
        actor = tmp_path / f"checkpoints/global_step_{step}/actor"
        actor.mkdir(parents=True)
        for name in ("a.bin", "b.bin"):
            (actor / name).write_bytes(b"1234")
    (tmp_path / "metrics.jsonl").touch()
    stat = os.stat

    def stat_and_remove(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = stat(path, *args, **kwargs)
        if "global_step_2/actor/" in str(path):
            monkeypatch.setattr(os, "stat", stat)
            shutil.rmtree(tmp_path / "checkpoints/global_step_2")
        return found

    monkeypatch.setattr(os, "stat", stat_and_remove)
    sizes = {found["step"]: found["bytes"] for found in read_run(tmp_path, "run", Limits())["checkpoints"]}
    assert not (tmp_path / "checkpoints/global_step_2").exists()
    assert sizes[4] == 8
    assert sizes.get(2, 0) <= 4


def test_the_speed_of_a_run_is_that_of_all_its_devices(tmp_path: Path) -> None:
    line = {"step": 1, "perf/total_num_tokens": 1200, "timing_s/step": 2.0, "perf/throughput": 150.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    shown = read_run(tmp_path, "run", Limits())
    assert dict(shown["summary"])["speed"] == "600 tokens/s, 2.00 s a step (median)"
    assert shown["curves"]["series"]["perf/tokens_per_second"] == (0, [600.0])


def test_the_page_tells_staleness_and_what_became_of_the_prompts(tmp_path: Path) -> None:
    line = {"step": 1, "training/staleness/mean": 0.5, "training/staleness/max": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text('{"step": 1, "trained": [[0, 0, 8]], "dropped": {"filter_groups": [[0, 8, 10]]}}\n')
    summary = dict(read_run(tmp_path, "run", Limits())["summary"])
    assert summary["staleness"] == "0.50 updates (mean), 1 at most"
    assert summary["prompts"] == "8 trained, 2 dropped (filter_groups)"
    ledger.write_text('{"step": 1, "trained": 7}\n')
    assert dict(read_run(tmp_path, "run", Limits())["summary"])["prompts"] == "ledger.jsonl can't be read"


def test_the_summary_of_stale_responses_says_which_side_waited() -> None:
    line = {"timing_s/step": 10.0, "training/staleness/mean": 1.0, "training/staleness/max": 2.0}
    line |= {"timing_s/wait_for_responses": 1.0, "timing_s/idle/rollout_pool": 4.0}
    lines = [{"step": 1, **line, "training/too_old_groups": 2.0}, {"step": 2, **line}]
    rows = dict(summarize(lines, {}, None))
    assert rows["staleness"] == "1.00 updates (mean), 2 at most"
    assert rows["waited for the other"] == "training 10%, rollout 40% of the time"
    assert rows["sampled anew"] == "2 groups that were too old"
    assert "waited for the other" not in dict(summarize([{"step": 1, "timing_s/step": 1.0}], {}, None))
