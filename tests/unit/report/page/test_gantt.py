"""Who did what in a step: a bar for each pool, from the timeline of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.report.page import gantt
from paceline.report.page.build import page_data
from paceline.report.page.read import Limits, read_run


def test_a_step_shows_which_pool_did_what(finished_run: Path) -> None:
    shown = read_run(finished_run, "run", Limits())["gantt"]
    assert shown["pools"]["critic_pool"] == {"processes": 1, "roles": ["critic"]}
    step = next(step for step in shown["steps"] if step["step"] == 3)
    own = {(pool, method) for pool, method, _, _, of, *_ in step["bars"] if of == 3}
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
    assert shown["steps"][0]["bars"] == [("critic_pool", "update_critic", 0.0, 4.0, 1, False, "")]


def test_bars_say_which_version_sampled_and_how_many_prompts_were_admitted(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "name": name, "ts": start * 1e6, "dur": 1e6, "args": {"pool": pool, "step": 1, **about}}
        for pool, name, start, about in (
            ("rollout_pool", "sample", 1.0, {"version": 0}),
            ("rollout_pool", "sample", 2.0, {"version": 0}),
            ("rollout_pool", "sample", 3.0, {"version": 1}),
            ("driver", "admit", 0.5, {"version": 0, "prompts": 8}),
        )
    ]
    (tmp_path / "timeline.json").write_text("{\n" + ",\n".join(map(json.dumps, events)) + "\n]}")
    bars = gantt.read_gantt(tmp_path, [1], 10)["steps"][0]["bars"]
    assert [(bar[1], bar[3] - bar[2], bar[6]) for bar in bars] == [
        ("admit", 1.0, "version 0, prompts 8"),
        ("sample", 2.0, "version 0"),
        ("sample", 1.0, "version 1"),
    ]


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
