from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.report.metrics import idle_metrics
from paceline.report.timeline import TimelineWriter, busy_seconds, read_events, spans


@dataclass
class Record:
    method: str
    start: float
    end: float
    pool: str = "actor_rollout_ref_pool"
    role: str = "actor_rollout"
    rank: int = 0
    pid: int = 100
    node: str = "node-a"
    tag: dict[str, Any] = field(default_factory=lambda: {"step": 1})
    process_roles: str = "actor_rollout"


def row_names(path: Path) -> dict[tuple[int, int], str]:
    """The name of each row as a viewer shows it: the last one given."""
    events = json.loads(path.read_text())["traceEvents"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_file_is_complete_json_after_every_flush(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    assert json.loads(path.read_text()) == {"traceEvents": [], "displayTimeUnit": "ms"}
    for step in range(3):
        writer.add([Record("generate_sequences", step, step + 0.5, tag={"step": step})])
        writer.flush()
        assert len(read_events(path)) == step + 1
    writer.flush()
    writer.close()
    assert [event["args"]["step"] for event in read_events(path)] == [0, 1, 2]


def test_flush_appends_and_leaves_earlier_bytes_alone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add([Record("update_actor", 0, 1) for _ in range(50)])
    writer.flush()
    inode, before = path.stat().st_ino, path.read_bytes()
    writer.add([Record("update_actor", 1, 2)])
    writer.close()
    assert path.stat().st_ino == inode
    assert path.read_bytes().startswith(before.removesuffix(b"\n]}\n"))


def test_span_carries_method_times_in_microseconds_and_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add([Record("update_actor", 1_700_000_000.25, 1_700_000_001.5, rank=3, tag={"step": 7, "epoch": 2})])
    writer.close()
    (event,) = read_events(path)
    assert (event["name"], event["ts"], event["dur"]) == ("update_actor", 1_700_000_000_250_000, 1_250_000)
    assert event["args"] == {
        "step": 7,
        "epoch": 2,
        "role": "actor_rollout",
        "rank": 3,
        "pool": "actor_rollout_ref_pool",
    }


def test_each_worker_process_is_a_row_named_by_pool_roles_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add([Record("a", 0, 1, rank=0, pid=100), Record("a", 0, 1, rank=1, pid=101)])
    writer.flush()
    writer.add(
        [
            Record("b", 1, 2, rank=0, pid=100),
            Record("c", 0, 1, pool="critic_pool", role="critic", process_roles="critic", pid=102),
        ]
    )
    writer.close()
    events = read_events(path)
    assert len({(event["pid"], event["tid"]) for event in events}) == 3
    assert (events[0]["pid"], events[0]["tid"]) == (events[2]["pid"], events[2]["tid"])
    assert events[0]["pid"] != events[3]["pid"]
    assert sorted(row_names(path).values()) == [
        "actor_rollout_ref_pool actor_rollout rank 0",
        "actor_rollout_ref_pool actor_rollout rank 1",
        "critic_pool critic rank 0",
    ]


def test_same_pid_on_two_nodes_makes_two_rows(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add([Record("a", 0, 1, rank=0, node="node-a"), Record("a", 0, 1, rank=1, node="node-b")])
    writer.close()
    assert len(row_names(path)) == 2


def test_roles_of_one_process_share_a_row_that_names_them_all(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    roles = "actor_rollout+critic"
    writer.add(
        [
            Record("generate_sequences", 0, 1, role="actor_rollout", process_roles=roles),
            Record("compute_values", 1, 2, role="critic", process_roles=roles),
        ]
    )
    writer.close()
    assert list(row_names(path).values()) == ["actor_rollout_ref_pool actor_rollout+critic rank 0"]


def test_driver_phases_have_their_own_row(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add([Record("a", 0, 1)])
    writer.add_span("driver", "compute_advantage", 1.0, 1.5, {"step": 4})
    writer.close()
    assert sorted(row_names(path).values()) == ["actor_rollout_ref_pool actor_rollout rank 0", "driver"]
    assert spans(path, "compute_advantage", step=4) == [(1.0, 1.5)]


def test_timeline_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for method in ("first", "second", "third"):
        writer = TimelineWriter(path)
        writer.add([Record(method, 0, 1)])
        writer.close()
    names = {file.name: read_events(file)[0]["name"] for file in tmp_path.iterdir()}
    assert names == {"timeline.1.json": "first", "timeline.2.json": "second", "timeline.json": "third"}


def test_spans_selects_by_method_and_step_in_order_of_start(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    writer = TimelineWriter(path)
    writer.add(
        [
            Record("update_critic", 5, 6, tag={"step": 2}),
            Record("update_critic", 2, 3, tag={"step": 1}),
            Record("update_actor", 2, 4, tag={"step": 1}),
        ]
    )
    writer.close()
    assert spans(path, "update_critic") == [(2.0, 3.0), (5.0, 6.0)]
    assert spans(path, "update_critic", step=2) == [(5.0, 6.0)]
    assert spans(path, "update_actor", step=2) == []


def test_busy_time_counts_shared_time_once_and_only_inside_the_window() -> None:
    assert busy_seconds([(0.0, 4.0), (1.0, 3.0)], 0.0, 10.0) == 4.0
    assert busy_seconds([(0.0, 4.0), (3.5, 6.0)], 3.0, 5.0) == 2.0
    assert busy_seconds([(0.0, 1.0)], 1.0, 2.0) == 0.0
    assert busy_seconds([], 1.0, 2.0) == 0.0


def test_idle_time_of_a_pool_is_what_none_of_its_processes_worked() -> None:
    records = [Record("a", 0, 2, pid=1), Record("a", 1, 3, rank=1, pid=2), Record("b", 5, 6, pid=1)]
    records += [Record("c", 0, 1, pool="critic_pool"), Record("d", 0, 9, pool="reward_pool")]
    metrics = idle_metrics(records, ["actor_rollout_ref_pool", "critic_pool"], 0.0, 8.0)
    assert metrics == {
        "timing_s/idle/actor_rollout_ref_pool": 4.0,
        "timing_s/idle/critic_pool": 7.0,
        "perf/overlap": 5 / 16,
    }
