"""What the trackers of other packages have in their local stores, where these are installed: `make test-trackers`.

Each session of a run is a process of its own, as it is in life.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TRACKERS = ("mlflow", "swanlab", "trackio")
pytestmark = pytest.mark.slow

SESSION = """
import json, sys
from paceline.report.trackers import Tracking
tracker, folder, resume_step, first, last = json.loads(sys.argv[1])
config = {"trainer": {"seed": 11, "name": "x" * 7000}, "data": {"files": ["a", "b"]}}
run = Tracking(folder, [tracker], "my_project", "my run", resume_step=resume_step, config=config)
for step in range(first, last + 1):
    run.log({"loss": step / 2, "val-core/own/acc/mean@4": 0.25, "nan": float("nan"), "text": "no scalar"}, step)
rows = [
    {"data_source": "own", "prompt": f"question {row}", "response": "two", "ground_truth": "4", "score": row / 8}
    for row in range(8)
]
run.show_generations(rows, last, 2)
run.close()
"""


@dataclass
class Stored:
    """A run as its tracker has it."""

    name: str
    losses: list[tuple[int, float]]
    """(step, value), in the order in which they came."""
    names: set[str]
    """Of all metrics."""
    seed: str
    texts: str


def session(tracker: str, folder: Path, *, resume_step: int | None, first: int, last: int) -> str:
    """Log some steps; returns what was printed."""
    variables = {"SWANLAB_MODE": "offline", "TRACKIO_DIR": str(folder.parent / "trackio"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SESSION, json.dumps([tracker, str(folder), resume_step, first, last])],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stored(tracker: str, folder: Path) -> list[Stored]:
    read = {"mlflow": mlflow_runs, "swanlab": swanlab_runs, "trackio": trackio_runs}
    return read[tracker](folder)


def mlflow_runs(folder: Path) -> list[Stored]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow/mlflow.db'}")
    experiment = client.get_experiment_by_name("my_project")
    assert experiment is not None
    found = []
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
        assert run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "loss")
        files = client.list_artifacts(run.info.run_id, "val_generations")
        texts = [Path(client.download_artifacts(run.info.run_id, file.path)).read_text() for file in files]
        assert len(run.data.params["trainer.name"]) == 6000
        found.append(
            Stored(
                run.info.run_name,
                [(point.step, point.value) for point in history],
                {name.replace("_at_", "@") for name in run.data.metrics},
                run.data.params["trainer.seed"],
                "".join(texts),
            )
        )
    return found


def swanlab_runs(folder: Path) -> list[Stored]:
    """Each session has a file of its own, under the id of its run."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs: dict[str, Stored] = {}
    for file in sorted(folder.glob("swanlab/*/*.swanlab"), key=lambda file: file.stat().st_mtime):
        reader = DataStoreReader()
        reader.open(file)
        records = [MessageToDict(Record.FromString(data), preserving_proto_field_name=True) for data in reader]
        reader.close()
        start = next(record["start"] for record in records if "start" in record)
        assert start["project"] == "my_project"
        run = runs.setdefault(start["id"], Stored(start["name"], [], set(), "", ""))
        for record in records:
            scalar = record.get("scalar")
            if scalar is not None:
                run.names.add(scalar["key"])
            if scalar is not None and scalar["key"] == "loss":
                run.losses.append((int(scalar["step"]), float(scalar["value"]["number"])))
        config = (file.parent / "files/config.yaml").read_text()
        run.seed = "11" if "seed" in config and "11" in config else config
        run.texts += "".join(text.read_text() for text in sorted(file.parent.glob("media/**/*.txt")))
    return list(runs.values())


def trackio_runs(folder: Path) -> list[Stored]:
    with sqlite3.connect(folder.parent / "trackio/my_project.db") as store:
        configs: list[tuple[str, str]] = store.execute("SELECT run_name, config FROM configs ORDER BY id").fetchall()
        found = []
        for name, config in configs:
            rows: list[tuple[int, str]] = store.execute(
                "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (name,)
            ).fetchall()
            metrics = [(step, json.loads(text)) for step, text in rows]
            found.append(
                Stored(
                    name,
                    [(step, values["loss"]) for step, values in metrics if "loss" in values],
                    {key for _, values in metrics for key in values if key != "val/generations"},
                    str(json.loads(config)["trainer"]["seed"]),
                    json.dumps([values["val/generations"] for _, values in metrics if "val/generations" in values]),
                )
            )
    return found


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_stores_steps_config_and_texts_and_a_resumed_run_goes_on(tracker: str, tmp_path: Path) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: make test-trackers")
    folder = tmp_path / "run"
    assert session(tracker, folder, resume_step=None, first=1, last=5) == "", "what it prints goes to the log"
    [run] = stored(tracker, folder)
    assert run.name.startswith("my run")
    assert run.losses == [(step, step / 2) for step in range(1, 6)]
    assert run.names == {"loss", "nan", "val-core/own/acc/mean@4"}
    assert run.seed == "11"
    assert [f"question {row}" in run.texts for row in range(8)] == [row in (0, 4) for row in range(8)]

    session(tracker, folder, resume_step=3, first=4, last=6)
    [resumed] = stored(tracker, folder)
    assert resumed.name == run.name
    assert sorted(set(resumed.losses)) == [(step, step / 2) for step in range(1, 7)]

    session(tracker, folder, resume_step=None, first=1, last=1)
    names: list[Any] = [one.losses for one in stored(tracker, folder)]
    assert len(names) == 2, "a run that starts anew is another one"
    assert names[0] == resumed.losses
    assert names[1] == [(1, 0.5)]
