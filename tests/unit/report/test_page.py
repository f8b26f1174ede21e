from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import DataError
from paceline.report.page import gantt, write_page
from paceline.report.page.build import differences, page_data, render
from paceline.report.page.read import Limits, read_run


def data_in(page: str) -> dict[str, Any]:
    """The data as the page's script reads them."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_command_writes_the_page_into_the_runs_folder(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("*.pt", "*.safetensors"))
    assert cli.main(["report", str(run)]) == 0
    assert f"{run / 'report.html'} (" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--output", str(tmp_path / "new/page.html")]) == 0
    page = (tmp_path / "new/page.html").read_text()
    shown = data_in(page)["runs"][0]
    assert ["state", "finished"] in shown["summary"]
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [2, 4]
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page


def test_curves_have_the_values_of_the_metrics(finished_run: Path) -> None:
    curves = read_run(finished_run, "run", Limits())["curves"]
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    place, values = curves["series"]["critic/score/mean"]
    assert curves["steps"][place] == [1, 2, 3, 4]
    assert values == pytest.approx([line["critic/score/mean"] for line in lines[1:]], rel=1e-5)
    place, _ = curves["series"]["val-core/openai/gsm8k/reward/mean@1"]
    assert curves["steps"][place] == [0, 2, 4]


def test_a_step_shows_which_pool_did_what(finished_run: Path) -> None:
    shown = read_run(finished_run, "run", Limits())["gantt"]
    assert shown["pools"]["critic_pool"] == {"processes": 1, "roles": ["critic"]}
    step = next(step for step in shown["steps"] if step["step"] == 3)
    own = {(pool, method) for pool, method, _, _, of, _ in step["bars"] if of == 3}
    assert {("actor_rollout_ref_pool", "generate_sequences"), ("critic_pool", "update_critic")} <= own
    assert all(step["start"] <= bar[3] and bar[2] <= step["end"] for bar in step["bars"])


def test_ranks_of_a_pool_become_one_bar(tmp_path: Path) -> None:
    spans = [("critic_pool", rank, 10.0 + rank, 12.0 + rank) for rank in range(3)]
    events = [
        {"ph": "X", "name": "update_critic", "ts": start * 1e6, "dur": (end - start) * 1e6}
        | {"args": {"pool": pool, "rank": rank, "role": "critic", "step": 1}}
        for pool, rank, start, end in spans
    ]
    (tmp_path / "timeline.json").write_text("{\n" + ",\n".join(map(json.dumps, events)) + "\n]}")
    shown = gantt.read_gantt(tmp_path, [1], 10)
    assert shown["pools"] == {"critic_pool": {"processes": 3, "roles": ["critic"]}}
    assert shown["steps"][0]["bars"] == [("critic_pool", "update_critic", 0.0, 4.0, 1, False)]


def test_steps_before_a_resume_come_from_the_timeline_that_was_put_aside(tmp_path: Path) -> None:
    def write(name: str, steps: range, method: str) -> None:
        lines = [
            json.dumps({"ph": "X", "name": method, "ts": step * 1e6, "dur": 5e5, "args": {"pool": "p", "step": step}})
            for step in steps
        ]
        (tmp_path / name).write_text("{\n" + ",\n".join(lines) + "\n]}")

    write("timeline.1.json", range(1, 5), "old")
    write("timeline.json", range(3, 7), "new")
    shown = gantt.read_gantt(tmp_path, [1, 2, 3, 4, 5, 6], 10)
    own = {step["step"]: {bar[1] for bar in step["bars"] if bar[4] == step["step"]} for step in shown["steps"]}
    assert own == {1: {"old"}, 2: {"old"}, 3: {"new"}, 4: {"new"}, 5: {"new"}, 6: {"new"}}


def test_a_step_that_is_asked_for_is_shown_in_any_case(finished_run: Path) -> None:
    few = Limits(gantt_steps=2, sample_steps=2)
    for limits, with_3 in ((few, False), (replace(few, steps=frozenset({3, 99})), True)):
        shown = read_run(finished_run, "run", limits)
        for part in ("gantt", "samples"):
            steps = [step["step"] for step in (shown[part]["steps"] if part == "gantt" else shown[part])]
            assert (3 in steps) == with_3
            assert steps == sorted(steps)
            assert 99 not in steps
    with pytest.raises(DataError, match="No run has a timeline or samples of step 99; there are steps 0 to 4"):
        page_data([finished_run], [3, 99])


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


def test_secrets_of_the_configuration_are_masked(finished_run: Path, tmp_path: Path) -> None:
    text = (finished_run / "config.yaml").read_text()
    secret = text.replace("ray_init: {}", "ray_init: {runtime_env: {env_vars: {WANDB_API_KEY: abc123}}}")
    assert secret != text
    (tmp_path / "config.yaml").write_text(secret)
    page = render(page_data([tmp_path]))
    assert "WANDB_API_KEY: '***'" in page
    assert "abc123" not in page


def test_no_text_of_a_run_ends_the_script(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    evil = "</script><script>window.pwned = 1</script>{{data}}\u2028"
    with (run / "samples/4.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "training", "prompt": evil, "response": evil, "score": 1}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, evil: 1.0}) + "\n")
    page = render(page_data([run]))
    assert page.count("</script>") == render(page_data([finished_run])).count("</script>")
    assert data_in(page)["runs"][0]["samples"][-1]["rows"][-1]["response"] == evil


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


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    with (tmp_path / "metrics.jsonl").open("w") as metrics, (tmp_path / "timeline.json").open("w") as timeline:
        for step in range(20_000):
            metrics.write(json.dumps({"step": step, **{f"m/{name}": step * 0.1234567 for name in range(20)}}) + "\n")
            args = {"pool": "p", "rank": 0, "role": "r", "step": step}
            timeline.write(json.dumps({"ph": "X", "name": "f", "ts": step * 1e6, "dur": 9e5, "args": args}) + ",\n")
    row = json.dumps({"kind": "training", "prompt": "p" * 100_000, "response": "r" * 100_000, "score": 1}) + "\n"
    for step in range(100):
        (tmp_path / f"samples/{step}.jsonl").write_text(row * 20)
    assert write_page([tmp_path], tmp_path / "report.html") < 4_000_000
    shown = data_in((tmp_path / "report.html").read_text())["runs"][0]
    assert len(shown["curves"]["series"]["m/0"][1]) == Limits().points
    assert shown["curves"]["steps"][0][-1] == 19_999
    assert shown["gantt"]["steps"][-1]["step"] == 19_999
    assert shown["samples"][-1]["step"] == 99


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(tmp_path)])
    assert stop.value.code == 1
    assert (
        "is no folder of a run: it has neither metrics.jsonl nor config.yaml, but notes.txt" in capsys.readouterr().err
    )
    (tmp_path / "empty").mkdir()
    for name, found in (("notes.txt", "it is a file"), ("empty", "it is empty"), ("none", "it does not exist")):
        with pytest.raises(DataError, match=f"is no folder of a run: {found}"):
            read_run(tmp_path / name, "run", Limits())
    with pytest.raises(DataError, match="named twice"):
        page_data([tmp_path, tmp_path])


def test_a_page_that_can_not_be_written_is_told_in_words(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for output, words in ((tmp_path, "is a folder. Give a file in it"), (tmp_path / "file/x.html", "can't be made")):
        with pytest.raises(SystemExit):
            cli.main(["report", str(finished_run), "--output", str(output)])
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


def test_runs_are_told_apart_by_what_differs_in_their_configuration() -> None:
    def rows(**values: str) -> list[tuple[str, str, str, bool]]:
        return [(key.replace("__", "."), value, "", True) for key, value in values.items()]

    first = rows(data__train_files="/a/x.parquet", actor__lr="1", critic__lr="1", trainer__default_local_dir="a")
    second = rows(data__train_files="/b/x.parquet", actor__lr="2", critic__lr="3", trainer__default_local_dir="b")
    assert differences([first, second]) == ["actor.lr=1, critic.lr=1", "actor.lr=2, critic.lr=3"]
    assert differences([first, first]) == ["", ""]
    many = [rows(**{f"k{number}": value for number in range(9)}) for value in "ab"]
    assert differences(many)[0] == "k0=a, k1=a, k2=a, 6 more"
