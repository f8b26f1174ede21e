from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.log_file import SAMPLES_LOGGER
from paceline.report.trackers import CONSOLE_METRICS, Tracking, console_line, read_metrics


def tracking(folder: Path, *, loggers: list[str] | None = None, resume_step: int | None = None) -> Tracking:
    return Tracking(folder, loggers or [], "project", "experiment", resume_step=resume_step, total_steps=10)


def steps_of(folder: Path) -> list[int]:
    """Read strictly: every line must be JSON, and none may hold a bare NaN."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse)["step"] for line in lines]


def log_steps(folder: Path, steps: range) -> None:
    run = tracking(folder)
    for step in steps:
        run.log({"loss": step / 2}, step)
    run.close()


def test_metrics_jsonl_is_written_whatever_the_loggers_are(tmp_path: Path) -> None:
    run = tracking(tmp_path / "new" / "folder")
    run.log({"actor/pg_loss": 0.5}, 1)
    assert read_metrics(tmp_path / "new" / "folder" / "metrics.jsonl") == [{"step": 1, "actor/pg_loss": 0.5}]
    run.close()


def test_values_of_any_kind_become_valid_json(tmp_path: Path) -> None:
    run = tracking(tmp_path, loggers=["tensorboard", "console"])
    metrics = {
        "numpy": np.float32(0.5),
        "tensor": torch.tensor(2.0, requires_grad=True),
        "array": np.array([1, 2]),
        "nan": float("nan"),
        "numpy_nan": np.float64("nan"),
        "infinity": float("inf"),
        "minus_infinity": torch.tensor(-float("inf")),
        "text": "split",
        "path": Path("folder"),
        "none": None,
        "nested": {"a": (np.int64(1), float("nan"))},
    }
    run.log(metrics, 0)
    run.close()
    assert steps_of(tmp_path) == [0]
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line == {
        "step": 0,
        "numpy": 0.5,
        "tensor": 2.0,
        "array": [1, 2],
        "nan": "NaN",
        "numpy_nan": "NaN",
        "infinity": "Infinity",
        "minus_infinity": "-Infinity",
        "text": "split",
        "path": "folder",
        "none": None,
        "nested": {"a": [1, "NaN"]},
    }


def test_resume_cuts_off_the_steps_that_come_again(tmp_path: Path) -> None:
    log_steps(tmp_path, range(6))
    run = tracking(tmp_path, resume_step=3)
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    run.log({"loss": 7.0}, 4)
    run.close()
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.5}', '{"step'])
def test_resume_cuts_off_a_line_that_was_not_written_to_its_end(tmp_path: Path, torn: str) -> None:
    log_steps(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    run = tracking(tmp_path, resume_step=5)
    run.log({"loss": 7.0}, 6)
    run.close()
    assert steps_of(tmp_path) == [0, 1, 2, 6]


def test_resume_says_when_the_line_of_its_checkpoint_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(tmp_path, range(3))
    with caplog.at_level(logging.WARNING):
        tracking(tmp_path, resume_step=2).close()
        assert not caplog.records
        tracking(tmp_path, resume_step=3).close()
    assert "no line of step 3" in caplog.text


def test_resume_in_a_folder_without_metrics_starts_the_file(tmp_path: Path) -> None:
    run = tracking(tmp_path, resume_step=3)
    run.log({}, 4)
    run.close()
    assert steps_of(tmp_path) == [4]


def test_fresh_start_keeps_the_files_of_earlier_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for count in (1, 2, 3):
        with caplog.at_level(logging.INFO):
            run = tracking(tmp_path, loggers=["tensorboard"])
        for step in range(count):
            run.log({"loss": 0.0}, step)
        run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.1.jsonl",
        "metrics.2.jsonl",
        "metrics.jsonl",
        "tensorboard",
        "tensorboard.1",
        "tensorboard.2",
    ]
    assert len(read_metrics(tmp_path / "metrics.1.jsonl")) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert "kept as metrics.2.jsonl" in caplog.text


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    log_steps(tmp_path, range(3))
    run = tracking(tmp_path, resume_step=2)
    with pytest.raises(ValueError, match="Step 2 was to be logged after step 2"):
        run.log({}, 2)
    run.close()


def test_a_killed_process_leaves_every_step_it_logged(tmp_path: Path) -> None:
    code = f"""
import os, signal
from paceline.log_file import SAMPLES_LOGGER
from paceline.report.trackers import Tracking
run = Tracking({str(tmp_path)!r}, [], "project", "experiment")
for step in range(5):
    run.log({{"loss": 1.0}}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert result.returncode == -signal.SIGKILL
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


def test_unknown_logger_is_a_config_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*did you mean tensorboard\?"):
        tracking(tmp_path, loggers=["console", "tensorbord"])
    assert list(tmp_path.iterdir()) == []


def tensorboard_steps(folder: Path, name: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(name)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for resume_step, steps in ((None, range(1, 6)), (3, range(4, 8))):
        run = tracking(tmp_path, loggers=["tensorboard"], resume_step=resume_step)
        for step in steps:
            run.log({"loss": 0.5, "text": "not a scalar"}, step)
        run.close()
    assert tensorboard_steps(tmp_path / "tensorboard", "loss") == [1, 2, 3, 4, 5, 6, 7]


ROWS = [
    {"data_source": "own", "prompt": f"question {row}", "response": "two\nlines", "ground_truth": "4", "score": row / 8}
    for row in range(8)
]


def test_shown_generations_are_spread_over_the_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tracking(tmp_path)
    with caplog.at_level(logging.INFO, logger=SAMPLES_LOGGER):
        run.show_generations(ROWS, 3, 0)
        run.show_generations([], 3, 2)
        assert caplog.records == []
        run.show_generations(ROWS, 3, 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "step 3 validation\n[data_source] own\n[prompt] question 0\n[response] two\nlines\n[ground_truth] 4\n[score] 0"
    )
    assert "[prompt] question 4\n" in second
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=SAMPLES_LOGGER):
        run.show_generations(ROWS, 4, 99)
    assert len(caplog.records) == len(ROWS)
    run.close()


def test_a_ground_truth_of_megabytes_does_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tracking(tmp_path)
    with caplog.at_level(logging.INFO, logger=SAMPLES_LOGGER):
        run.show_generations([{**ROWS[0], "ground_truth": "x" * 1_000_000}], 3, 1)
    assert len(caplog.text) < 1_000
    run.close()


def test_tensorboard_shows_generations_as_they_are(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracking(tmp_path, loggers=["tensorboard"])
    run.show_generations(ROWS, 3, 2)
    run.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == ["val/generations/1/text_summary", "val/generations/2/text_summary"]
    (event,) = accumulator.Tensors("val/generations/2/text_summary")
    assert event.step == 3
    assert "    [response] two\n    lines\n" in event.tensor_proto.string_val[0].decode()


def test_one_tracker_that_cannot_be_closed_keeps_no_other_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking(tmp_path, loggers=["tensorboard"])

    def fail() -> None:
        raise OSError("disk full")

    jsonl, board = run._trackers
    monkeypatch.setattr(jsonl, "close", fail)
    closed = []
    monkeypatch.setattr(board, "close", lambda: closed.append(True))
    run.close()
    assert closed
    assert "JsonlTracker could not be closed" in caplog.text


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def wandb_records(file: Path) -> list[Any]:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # its own process may write the file a moment after the run was finished
    store = DataStore()
    store.open_for_scan(str(file))
    records = []
    while (data := store.scan_data()) is not None:
        records.append(Record.FromString(data))
    return records


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_gets_scalars_generations_and_config_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    run = Tracking(tmp_path, ["wandb"], "my_project", "my_run", config={"trainer": {"seed": 11}})
    for step in range(1, 6):
        run.log({"loss": step / 2, "text": "not a scalar"}, step)
    run.show_generations(ROWS, 5, 2)
    run.close()
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    records = wandb_records(file)
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (started.project, started.display_name, started.run_id) == ("my_project", "my_run", run_id)
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["trainer"] == {"seed": 11}
    history = wandb_history(records)
    assert [(line["global_step"], line["loss"]) for line in history[:-1]] == [(step, step / 2) for step in range(1, 6)]
    assert not any("text" in line for line in history)
    assert history[-1]["global_step"] == 5
    (table,) = file.parent.glob("files/media/table/val/*.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["step", "data_source", "prompt", "response", "ground_truth", "score"]
    assert shown["data"] == [
        [5, "own", "question 0", "two\nlines", "4", 0],
        [5, "own", "question 4", "two\nlines", "4", 0.5],
    ]

    # wandb's own count takes no step twice, so all is drawn by our step, which comes again after a resume.
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["global_step"]
    file.parent.rename(tmp_path / "first")
    run = tracking(tmp_path, loggers=["wandb"], resume_step=3)
    run.log({"loss": 2.0}, 4)
    run.close()
    assert (tmp_path / "wandb_run_id.txt").read_text() == run_id
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    (line,) = wandb_history(wandb_records(file))
    assert (line["global_step"], line["loss"]) == (4, 2.0)


@pytest.mark.usefixtures("wandb_offline")
def test_a_fresh_start_is_another_wandb_run(tmp_path: Path) -> None:
    for _ in range(2):
        tracking(tmp_path, loggers=["wandb"]).close()
    ids = [(tmp_path / name).read_text() for name in ("wandb_run_id.txt", "wandb_run_id.1.txt")]
    assert ids[0] != ids[1]


def test_wandb_that_is_not_installed_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install wandb==0.28.2"):
        tracking(tmp_path, loggers=["wandb"])
    assert list(tmp_path.iterdir()) == []


def test_console_gives_one_line_per_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tracking(tmp_path, loggers=["console"])
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paceline.report.trackers"):
        run.log({"critic/score/mean": 0.25, "actor/pg_loss": torch.tensor(-0.01)}, 3)
    run.close()
    assert [record.getMessage() for record in caplog.records] == ["step 3/10 | score 0.250 | pg_loss -0.0100"]


def test_console_line_holds_the_key_metrics_in_a_fixed_order() -> None:
    metrics = {
        "perf/throughput": 1234.4,
        "timing_s/step": 1.5,
        "response_length/mean": 7.25,
        "actor/entropy": 0.4,
        "actor/ppo_kl": 0.0001,
        "actor/pg_loss": float("nan"),
        "critic/score/mean": 0.5,
        "val-core/openai/gsm8k/reward/mean@1": 0.75,
        "val-core/openai/gsm8k/acc/mean@1": 0.75,
        "val-core/own/reward/mean@1": 1.5,
        "val-aux/other": 1.0,
    }
    assert console_line(metrics, 3) == ("step 3 | score 0.500 | 1.50 s | val gsm8k acc 0.750 | val own reward 1.500")


def test_console_line_fits_a_terminal_of_80_columns() -> None:
    metrics = {
        **dict.fromkeys(CONSOLE_METRICS, 12345.678),
        **{f"val-core/benchmark_{number}/acc/mean@16": 0.5 for number in range(9)},
    }
    line = console_line(metrics, 123_456, 999_999)
    assert len(line) <= 80
    assert line.startswith("step 123456/999999 | score 12345.678 | val benchmark_0 acc@16 0.500")
    without = {name: value for name, value in metrics.items() if not name.startswith("val-core/")}
    assert len(console_line(without, 123_456, 999_999)) <= 80
