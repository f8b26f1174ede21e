"""What Prometheus reads."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from paceline.errors import ResourceError
from paceline.report.prometheus import PrometheusTracker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_the_newest_step_is_served_until_the_run_ends() -> None:
    port = free_port()
    calls, more = {"critic_pool": "idle"}, {"queue": {"sampling": 12, "ended": 4}}
    tracker = PrometheusTracker(port, lambda: calls, lambda running: more, total_steps=50, step=3, deaths=2)
    try:
        tracker.log({"step": 1, "actor/pg_loss": 0.5, "timing_s/gen": 2.0, "old": 1.0}, step=1)
        calls["critic_pool"] = "update_critic"
        more["waits"] = "training"
        tracker.log({"actor/pg_loss": float("nan"), "timing_s/gen": 3.0, "training/staleness/max": 2.0}, step=2)
        found = read(port)
        assert found["paceline_step"] == 2
        assert found["paceline_total_steps"] == 50
        assert found['paceline_phase_seconds{phase="gen"}'] == 3.0
        assert found['paceline_metric{name="training/staleness/max"}'] == 2.0
        assert found['paceline_pool_call{call="update_critic",pool="critic_pool"}'] == 1.0
        assert found['paceline_queue_prompts{state="sampling"}'] == 12
        assert found['paceline_waiting{side="training"}'] == 1
        assert found['paceline_waiting{side="rollout"}'] == 0
        assert found["paceline_deaths_total"] == 2
        assert not [name for name in found if "old" in name or "pg_loss" in name]
        with pytest.raises(ResourceError, match=f"trainer.prometheus_port={port} can't be served on"):
            PrometheusTracker(port, dict, lambda running: {}, total_steps=1)
    finally:
        tracker.close()
    with pytest.raises(OSError, match="refused"):
        read(port)
