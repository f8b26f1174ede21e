from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from paceline.report.live import MetricsTail, RunView, closing_text, live_view


def write_status(folder: Path, **changes: object) -> None:
    status = {"state": "running", "step": 3, "total_steps": 10, "updated": time.time() + 1, "running": {}}
    (folder / "status.json").write_text(json.dumps({**status, **changes}))


def test_an_earlier_runs_files_are_not_taken_for_this_ones(finished_run: Path) -> None:
    assert RunView(finished_run).rows()[0][1].startswith("starting")


def test_the_view_has_step_phases_scores_speed_and_time_left(finished_run: Path, tmp_path: Path) -> None:
    shutil.copy(finished_run / "metrics.jsonl", tmp_path)
    view = RunView(tmp_path)
    write_status(
        tmp_path, step=5, running={"critic_pool": "update_critic", "actor_rollout_ref_pool": "generate_sequences"}
    )
    rows = dict(view.rows())
    assert rows["step"].startswith("5/10  ━")
    assert rows["critic_pool"] == "update_critic"
    assert rows["actor_rollout_ref_pool"] == "generate_sequences"
    assert len(rows["score"].split()[1]) == 4, "a bar for each step"
    assert len(rows["openai/gsm8k/reward/mean@1"].split()[1]) == 3
    assert "tokens/s" in rows["speed"]
    assert rows["left"].startswith("about ")


def test_the_percentage_counts_finished_steps(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_status(tmp_path, step=5)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    assert dict(view.rows())["step"].startswith("5/10  ")
    assert dict(view.rows())["step"].endswith(" 40 %")


def test_the_time_left_is_guessed_from_the_steps_of_this_start(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    metrics = [{"step": step, "timing_s/step": 100.0, "perf/total_num_tokens": 10} for step in range(1, 7)]
    metrics += [{"step": 7, "timing_s/step": 2.0, "perf/total_num_tokens": 10}]
    lines = [json.dumps(line) + "\n" for line in metrics]
    write_status(tmp_path, step=7, first_step=6)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert "left" not in dict(view.rows()), "nothing is known of this start yet"
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert dict(view.rows())["left"] == "about 6 s"


def test_a_run_with_stale_responses_shows_how_stale(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_status(tmp_path, step=2)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "training/staleness/mean": 1.5, "training/staleness/max": 2.0}\n'
    )
    assert dict(view.rows())["staleness"] == "1.50 updates, 2 at most"


def test_a_rollout_that_is_ahead_shows_its_queue_and_who_waits_for_whom(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_status(tmp_path, queue={"sampling": 12, "ended": 4}, waits="rollout")
    rows = dict(view.rows())
    assert rows["queue"] == "12 prompts sampling, 4 prompts ended"
    assert rows["waiting"] == "the rollout for the training"
    write_status(tmp_path, queue={"ahead": 8})
    rows = dict(view.rows())
    assert (rows["queue"], rows["waiting"]) == ("8 prompts ahead", "neither side")
    write_status(tmp_path)
    assert not {"queue", "waiting"} & dict(view.rows()).keys()


def test_a_validation_shows_how_far_it_is(tmp_path: Path) -> None:
    view = RunView(tmp_path)
    write_status(tmp_path, validation=[32, 64])
    assert dict(view.rows())["validation"].startswith("32/64 prompts  ━")


def test_metrics_are_followed_through_growth_a_cut_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert [line["step"] for line in tail.read()] == [1]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert [line["step"] for line in tail.read()] == [1, 2]
    path.write_text('{"step": 1}\n')
    assert [line["step"] for line in tail.read()] == [1]
    new = tmp_path / "new"
    new.write_text('{"step": 7}\n{"step": 8}\n')
    new.replace(path)
    assert [line["step"] for line in tail.read()] == [7, 8]


def test_without_a_terminal_there_is_no_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_view(tmp_path, None):
        sys.stdout.write("a line\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a line\n", "")


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
