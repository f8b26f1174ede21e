"""Processes of a run die, and it goes on by itself as if they had not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import ray

from paceline.errors import WorkerError
from paceline.trainer.main_ppo import run_ppo
from tests import chaos
from tests.faults import FAULTS, POINTS, FaultyRunner, UnsavedRunner
from tests.in_process import train_in_process
from tests.runs import as_omegaconf, base_config, make_material, results

ROLLOUT = "actor_rollout_ref__rollout__"
SPLIT = {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2}
ONE_DEVICE = {"trainer__placement__name": "colocated", "trainer__n_gpus_per_node": 1}


LOOP = '''
from paceline.agents import AgentLoop
from tests.faults import strike


class Mortal(AgentLoop):
    """One turn; the first time that it sees row 9, its process dies."""

    async def run(self, request, generate):
        conversation = request.begin()
        strike("generation", ready=request.row["index"] == 9)
        await generate(conversation)
        return conversation
'''


@pytest.fixture
def faults(tmp_path: Path):
    """A Ray whose processes know where deaths are noted."""
    (tmp_path / "faults").mkdir()
    environment = {FAULTS: str(tmp_path / "faults")}
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
    yield tmp_path / "faults"
    ray.shutdown()


def through_agents(folder: Path) -> dict[str, object]:
    """The keys of a run whose single turns are had by two mortal agents."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "loops.yaml").write_text(f"- {{name: mortal, _target_: {folder}/loop.py:Mortal}}\n")
    return {
        f"{ROLLOUT}agent__num_workers": 2,
        f"{ROLLOUT}agent__default_agent_loop": "mortal",
        f"{ROLLOUT}agent__agent_loop_config_path": str(folder / "loops.yaml"),
    }


@pytest.mark.parametrize("who", ["agent", pytest.param("actor_rollout", marks=pytest.mark.slow)])
def test_a_run_survives_deaths_in_generation_updates_checkpoint_and_driver(
    who: str, faults: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The responses come from the rollout itself, or through agents, of which one dies."""
    material = make_material(tmp_path / "material")
    settings = {"trainer__total_training_steps": 6, "trainer__save_freq": 1, **SPLIT}
    train_in_process(base_config(material, tmp_path / "undisturbed", **(settings | ONE_DEVICE)))
    settings |= {"trainer__max_restarts": len(POINTS), **(through_agents(tmp_path) if who == "agent" else {})}
    run_ppo(as_omegaconf(base_config(material, tmp_path / "disturbed", **settings)), task_runner_class=FaultyRunner)
    assert sorted(os.listdir(faults)) == sorted(POINTS)
    assert results(tmp_path / "disturbed", "agent/", "val-aux/agent/") == results(tmp_path / "undisturbed")
    assert caplog.text.count("starting again from") == len(POINTS)
    for words in (
        r"agent rank \d failed in \w+" if who == "agent" else "actor_rollout rank 0 failed in generate_sequences",
        "critic rank 0 failed in update_critic",
        "critic rank 0 failed in save_checkpoint",
        "task_runner rank 0 failed in run",
    ):
        assert re.search(
            rf"{words}: its process \(pid .* on .*\) was killed by SIGKILL.*; last seen .* GB free", caplog.text
        )


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("raylet", signal.SIGKILL),
        pytest.param("gcs_server", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("gcs_server", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("raylet", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("driver", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_the_death_and_the_silence_of_rays_own_processes_and_of_its_driver(
    victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    material = make_material(tmp_path / "material")
    train_in_process(base_config(material, tmp_path / "undisturbed", **(chaos.SETTINGS | ONE_DEVICE)))
    strike = chaos.Strike(victim, number, step=5, seconds=0.0)
    said = chaos.disturbed("sync", material, tmp_path / "disturbed", strike, seconds=120)
    assert "1 restart, " in said, (tmp_path / "disturbed.txt").read_text()
    assert results(tmp_path / "disturbed") == results(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_rank_that_cannot_save_ends_the_run_though_the_others_wait_for_it(
    faults: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are in a collective, which would wait for half an hour."""
    material = make_material(tmp_path / "material")
    changes = {"actor_rollout_ref__actor__strategy": "fsdp2", "trainer__n_gpus_per_node": 2, "trainer__save_freq": 1}
    config = base_config(material, tmp_path / "run", algorithm__adv_estimator="remax", **changes)
    with pytest.raises(WorkerError, match="actor_rollout rank 0 failed in save_checkpoint: OSError: no space left"):
        run_ppo(as_omegaconf(config), task_runner_class=UnsavedRunner)
    assert "set trainer.save_freq; trainer.max_restarts=3" in caplog.text
    pids = [actor["Pid"] for actor in ray._private.state.actors().values()]
    assert len(pids) >= 4  # two devices, the reward process and the driver
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive
