from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from paceline.report import status
from paceline.report.status import StatusWriter, deaths_before, end_status, read_status


def test_what_runs_is_written_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.01)
    asked_again = threading.Event()
    calls = iter(["generate_sequences"])

    def running() -> dict[str, str]:
        method = next(calls, None)
        if method is None:
            asked_again.set()
        return {"global_pool": method or "update_actor"}

    writer = StatusWriter(tmp_path / "status.json", running, total_steps=9)
    assert asked_again.wait(60), "a thread goes on writing"
    writer.set_step(3)
    writer.close("failed", "WorkerError: critic 0")
    writer.close("stopped")
    last = read_status(tmp_path)
    assert last is not None
    assert {name: last[name] for name in ("state", "step", "total_steps", "error", "running")} == {
        "state": "failed",
        "step": 3,
        "total_steps": 9,
        "error": "WorkerError: critic 0",
        "running": {},
    }


def test_a_killed_run_is_silent_and_a_broken_file_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    path = tmp_path / "status.json"
    path.write_text('{"state": "runn')
    assert read_status(tmp_path) is None
    path.write_text(json.dumps({"state": "running", "updated": time.time()}))
    assert read_status(tmp_path)["state"] == "running"
    path.write_text(json.dumps({"state": "running", "updated": time.time() - 1000}))
    assert read_status(tmp_path)["state"] == "silent"
    path.write_text(json.dumps({"state": "finished", "updated": time.time() - 1000}))
    assert read_status(tmp_path)["state"] == "finished"


def test_deaths_are_counted_through_restarts(tmp_path: Path) -> None:
    """Of a run that is resumed, and of one that died before its first checkpoint."""

    def start(*, resumes: bool) -> StatusWriter:
        deaths = deaths_before(tmp_path, resumes=resumes)
        return StatusWriter(tmp_path / "status.json", dict, total_steps=9, deaths=deaths)

    def deaths() -> object:
        return json.loads((tmp_path / "status.json").read_text())["deaths"]

    assert deaths_before(tmp_path, resumes=False) == 0
    killed = start(resumes=False)
    killed._closed.set()  # it writes no more
    killed._thread.join()
    start(resumes=False).close("failed")
    start(resumes=True).close("stopped")
    assert deaths() == 2
    start(resumes=True).close("finished")
    assert deaths() == 2
    start(resumes=False).close("finished")
    assert deaths() == 0


def test_a_run_ends_with_its_status(finished_run: Path) -> None:
    last = read_status(finished_run)
    assert (last["state"], last["step"], last["total_steps"]) == ("finished", 4, 4)


def test_another_process_may_say_how_a_run_ended_that_can_not_say_so_itself(tmp_path: Path) -> None:
    end_status(tmp_path, "stopped")  # a run that never wrote one
    assert read_status(tmp_path) is None
    running = {"state": "running", "step": 3, "total_steps": 9, "started": 50.0, "updated": 60.0, "running": {"a": "b"}}
    (tmp_path / "status.json").write_text(json.dumps(running))
    end_status(tmp_path, "stopped", since=51.0)  # an earlier run's
    assert json.loads((tmp_path / "status.json").read_text()) == running
    end_status(tmp_path, "failed", "WorkerError: gone", since=49.0)
    expected = running | {"state": "failed", "error": "WorkerError: gone", "running": {}}
    assert json.loads((tmp_path / "status.json").read_text()) == expected
    end_status(tmp_path, "stopped")  # it was said
    assert json.loads((tmp_path / "status.json").read_text()) == expected
