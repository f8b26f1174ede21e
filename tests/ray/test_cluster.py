"""The same command on two nodes, each with a raylet of its own: the same numbers, also when a node goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from paceline.errors import ResourceError
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from paceline.trainer.device import detect_device
from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.runs import as_omegaconf, as_overrides, base_config, make_material, results

pytestmark = pytest.mark.slow  # two nodes, and the time in which Ray notices that one is gone

PATIENCE_SECONDS = 300
STEPS = {"trainer__total_training_steps": 6, "trainer__save_freq": 1}
TWO_NODES = {"trainer__nnodes": 2, "trainer__n_gpus_per_node": 1}
FSDP2 = {"actor_rollout_ref__actor__strategy": "fsdp2", "critic__strategy": "fsdp2"}

Start = Callable[[dict[str, Any], Path], subprocess.Popen]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head with as many CPUs as the test says, and one more node with one."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": request.param, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def material(tmp_path: Path) -> Path:
    return make_material(tmp_path / "material")


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text()):
        output = run_dir.with_suffix(".txt").read_text()
        assert process.poll() is None, output
        assert time.monotonic() < deadline, output
        time.sleep(0.05)


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    """Types the command on the first node."""
    started = []

    def start(config: dict[str, Any], run_dir: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "paceline.trainer.main_ppo", *as_overrides(config)]
        command += ["+ray_kwargs.ray_init.address=auto"]
        with run_dir.with_suffix(".txt").open("w") as output:
            environment = {**os.environ, "RAY_ADDRESS": cluster.address}
            started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_split_run_over_two_nodes_survives_the_loss_of_one_and_equals_a_run_in_one_process(
    start: Start, cluster: Cluster, material: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "cluster"
    split = {**STEPS, **TWO_NODES, "trainer__placement__name": "split", "trainer__max_restarts": 1}
    process = start(base_config(material, run_dir, **split), run_dir)
    train_in_process(base_config(material, tmp_path / "alone", **STEPS))
    wait_for_step(run_dir, 2, process)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    assert process.wait(timeout=PATIENCE_SECONDS) == 0, run_dir.with_suffix(".txt").read_text()
    output = run_dir.with_suffix(".txt").read_text()
    assert "starting again from the last checkpoint" in output
    assert "node has died" in output
    assert results(run_dir) == results(tmp_path / "alone")


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_ranks_on_two_nodes_give_the_numbers_of_ranks_on_one(cluster: Cluster, material: Path, tmp_path: Path) -> None:
    ray.init(cluster.address)
    run_ppo(as_omegaconf(base_config(material, tmp_path / "one", trainer__n_gpus_per_node=2, **FSDP2)))
    run_ppo(as_omegaconf(base_config(material, tmp_path / "two", **TWO_NODES, **FSDP2)))
    assert results(tmp_path / "two") == results(tmp_path / "one")


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_lost_node_ends_a_run_that_may_not_start_again(
    start: Start, cluster: Cluster, material: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "lost"
    endless = {**TWO_NODES, **FSDP2, "trainer__total_training_steps": 100000}
    process = start(base_config(material, run_dir, **endless), run_dir)
    wait_for_step(run_dir, 2, process)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    assert process.wait(timeout=60) == 1
    output = run_dir.with_suffix(".txt").read_text()
    assert "node has died" in output
    assert "it has no checkpoint, so the same command starts from the beginning" in output


class Counting(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        return torch.get_num_threads()


def test_threads_and_device_are_those_of_the_nodes_that_run_workers() -> None:
    """The second node has GPUs, as Ray is told, and may use one core; this process may use all, and sees no GPU."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        cluster.add_node(num_cpus=1, num_gpus=2)
    finally:
        os.sched_setaffinity(0, cores)
    ray.init(cluster.address)
    try:
        assert detect_device() == "cuda"
        pool = RayResourcePool([1, 1], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counting))
        assert sorted(group.threads()) == sorted([1, len(cores)])
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_pool_waits_for_nodes_that_join_on_demand(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    ray.init(cluster.address)
    three = {"process_on_nodes": [1, 1, 1], "use_gpu": False}
    with pytest.raises(ResourceError, match="did not fit this cluster within 2 s"):
        RayWorkerGroup(RayResourcePool(**three, wait_for_nodes_seconds=2), RayClassWithInitArgs(Counting))
    assert "waits for nodes since 0 s" in caplog.text
    pool = RayResourcePool(**three, wait_for_nodes_seconds=60)
    with ThreadPoolExecutor(1) as thread:  # Ray starts a node in the main thread alone
        waiting = thread.submit(pool.acquire, "late", 10)
        time.sleep(2)
        assert not waiting.done()
        cluster.add_node(num_cpus=1)
        assert len(waiting.result()) == 3
    pool.release("late")
    with pytest.raises(ResourceError, match="can never fit this cluster"):
        RayWorkerGroup(RayResourcePool([1, 1, 1, 1], use_gpu=False), RayClassWithInitArgs(Counting))


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_a_pool_that_does_not_fit_names_the_cluster_that_was_not_joined(cluster: Cluster) -> None:
    ray.init("local", num_cpus=1, include_dashboard=False)
    with pytest.raises(ResourceError) as caught:
        RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Counting))
    assert f"Another one runs on this machine, at {cluster.address}" in str(caught.value)
    assert "RAY_ADDRESS" in str(caught.value)
