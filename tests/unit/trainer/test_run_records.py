"""What a run tells other systems, as its own records wire it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from paceline.config.load import load_config
from paceline.trainer.run_records import RunRecords
from tests.unit.report.test_prometheus import free_port, read


def records_of(folder: Path, **trainer: object) -> RunRecords:
    settings = {"logger": [], "default_local_dir": str(folder), **trainer}
    return RunRecords(
        folder,
        load_config(OmegaConf.create({"trainer": settings})),
        resume_step=None,
        step=0,
        total_steps=9,
        pools=["critic_pool"],
        pool_of_role={"critic": "critic_pool"},
        drain_call_records=list,
        running_calls=lambda: {"critic": "update_critic"},
        more=lambda running: {"queue": {"ahead": 8}, "waits": "training"} if running else {},
    )


def test_prometheus_reads_the_run_and_the_deaths_before_it(tmp_path: Path) -> None:
    died = records_of(tmp_path)
    died.end("failed", RuntimeError("a worker is gone"))
    died.close()
    port = free_port()
    records = records_of(tmp_path, prometheus_port=port)
    try:
        records.begin_step(1)
        seconds, _ = records.step_seconds(1)
        records.write_line(1, {"critic/vf_loss": 0.5, "timing_s/step": seconds["step"]})
        found = read(port)
        assert found['paceline_pool_call{call="update_critic",pool="critic_pool"}'] == 1
        assert found['paceline_queue_prompts{state="ahead"}'] == 8
        assert found['paceline_waiting{side="training"}'] == 1
        assert found['paceline_metric{name="critic/vf_loss"}'] == 0.5
        assert found["paceline_deaths_total"] == 1
    finally:
        records.close()
    assert json.loads((tmp_path / "status.json").read_text())["deaths"] == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
