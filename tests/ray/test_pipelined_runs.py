"""Rollout, actor and critic on pools of their own, at the same time: asynchronous PPO with a split critic, on real Ray.

The same run in this process and on one pool has the same versions, and so the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.report.timeline import Span, read_events
from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.learn.test_schedules import assert_exactly_once
from tests.runs import as_omegaconf, base_config, read_metrics, results

LAST_BITS = "training/rollout_probs_diff"  # a copy of the weights lies elsewhere in memory
STEPS = 6
AHEAD = {
    "trainer__schedule__name": "pipelined",
    "trainer__schedule__max_staleness": 1,
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 2,
    "trainer__test_freq": 2,
}
THREE_POOLS = {
    "trainer__n_gpus_per_node": 3,
    "trainer__cpus_per_device": 0.5,
    "trainer__placement__name": "split",
    "trainer__placement__rollout_devices": 1,
}


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PACELINE_CHECK_INPUTS": "1"}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def apart(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("apart")
    run_ppo(as_omegaconf(base_config(material, run_dir, **AHEAD, **THREE_POOLS)))
    return run_dir


def test_pools_side_by_side_give_the_numbers_of_one_pool(apart: Path, material: Path, tmp_path: Path) -> None:
    train_in_process(base_config(material, tmp_path, **AHEAD))
    assert results(apart, LAST_BITS) == results(tmp_path, LAST_BITS)
    assert (apart / "ledger.jsonl").read_bytes() == (tmp_path / "ledger.jsonl").read_bytes()
    assert [line["training/staleness/max"] for line in read_metrics(apart)[1:]] == [0, 1, 1, 1, 1, 1]


def spans(run: Path, method: str) -> dict[int, Span]:
    """By step: when a call of training ran, in seconds."""
    events = [event for event in read_events(run / "timeline.json") if event["name"] == method]
    return {
        event["args"]["step"]: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if "validation" not in event["args"]
    }


def test_the_rollout_of_the_next_step_runs_beside_the_training_of_this_one(apart: Path) -> None:
    rollouts, updates = spans(apart, "generate_sequences"), spans(apart, "update_actor")
    for step in range(1, STEPS):
        assert rollouts[step + 1][0] < updates[step][0], f"rollout {step + 1} waited for the update of step {step}"
    for step in range(3, STEPS + 1):
        assert rollouts[step][0] > updates[step - 2][1], f"rollout {step} did not wait for its weights"


def test_streaming_on_three_pools_keeps_the_bound_and_trains_each_prompt_once(material: Path, tmp_path: Path) -> None:
    changes = {**AHEAD, **THREE_POOLS, "trainer__schedule__name": "streaming", "actor_rollout_ref__rollout__n": 2}
    run_ppo(as_omegaconf(base_config(material, tmp_path, **changes)))
    lines = read_metrics(tmp_path)[1:]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["training/staleness/max"] for line in lines) <= 1
    assert_exactly_once(tmp_path)
    assert sum(line["timing_s/gen"] for line in lines if "timing_s/gen" in line) > 0
    idle, whole = (sum(line[f"timing_s/{name}"] for line in lines) for name in ("idle/rollout_pool", "step"))
    assert idle < whole, "what is sampled beside the calls is work"
    events = read_events(tmp_path / "timeline.json")
    sampling = [event["args"] for event in events if event["name"] == "sample"]
    assert {args["pool"] for args in sampling} == {"rollout_pool"}
    assert {args["version"] for args in sampling} > {0, 1}


WITHOUT_STALENESS = {
    "trainer__schedule__max_staleness": 0,
    "trainer__total_training_steps": 2,
    "trainer__save_freq": -1,
}
TWO_POOLS = {"trainer__n_gpus_per_node": 2, "trainer__placement__rollout_devices": 1}


@pytest.mark.parametrize("name", [pytest.param("pipelined", marks=pytest.mark.slow), "streaming"])
def test_without_staleness_both_are_sync(name: str, material: Path, tmp_path: Path) -> None:
    schedule = {**WITHOUT_STALENESS, "actor_rollout_ref__rollout__n": 2, "trainer__schedule__name": name}
    run_ppo(as_omegaconf(base_config(material, tmp_path / "run", **{**AHEAD, **schedule, **TWO_POOLS})))
    train_in_process(
        base_config(
            material, tmp_path / "sync", **{**AHEAD, **schedule, **TWO_POOLS, "trainer__schedule__name": "sync"}
        )
    )
    assert results(tmp_path / "run", "training/too_old_groups") == results(tmp_path / "sync")


@pytest.mark.slow
def test_streaming_without_staleness_on_two_rollout_devices_is_sync(material: Path, tmp_path: Path) -> None:
    devices = {"trainer__n_gpus_per_node": 3, "trainer__placement__rollout_devices": 2, "trainer__cpus_per_device": 0.5}
    for name in ("sync", "streaming"):
        schedule = {**WITHOUT_STALENESS, "actor_rollout_ref__rollout__n": 2, "trainer__schedule__name": name}
        run_ppo(as_omegaconf(base_config(material, tmp_path / name, **{**AHEAD, **schedule, **devices})))
    assert results(tmp_path / "streaming", "training/too_old_groups") == results(tmp_path / "sync")


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "restart", "finish"])
def test_streaming_on_two_rollout_devices_keeps_the_bound(on_update: str, material: Path, tmp_path: Path) -> None:
    devices = {"trainer__n_gpus_per_node": 3, "trainer__placement__rollout_devices": 2, "trainer__cpus_per_device": 0.5}
    how = {"name": "streaming", "max_staleness": 2, "on_too_old": "drop", "on_update": on_update}
    schedule = {f"trainer__schedule__{key}": value for key, value in how.items()}
    few = {"actor_rollout_ref__rollout__n": 2, "actor_rollout_ref__rollout__max_num_seqs": 4}
    run_ppo(as_omegaconf(base_config(material, tmp_path, **{**AHEAD, **devices, **schedule, **few})))
    lines = read_metrics(tmp_path)[1:]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert max(line["training/staleness/max"] for line in lines) <= 2
    assert_exactly_once(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_was_sampled_ahead(apart: Path, material: Path, tmp_path: Path) -> None:
    checkpoint = apart / "checkpoints" / "global_step_2"
    assert [item["step"] for item in json.loads((checkpoint / "trainer.json").read_text())["rollouts"]] == [3]
    path: dict[str, Any] = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(checkpoint)}
    run_ppo(as_omegaconf(base_config(material, tmp_path, **AHEAD, **THREE_POOLS, **path)))
    assert results(tmp_path) == results(apart)[3:]
    assert set(spans(tmp_path, "generate_sequences")) == {4, 5, 6}, "the rollout of step 3 was in the checkpoint"
