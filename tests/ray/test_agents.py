"""Agents in processes of their own: the same run, and what becomes of it when one of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.runs import as_omegaconf, base_config, make_material, read_metrics, results

ROLLOUT = "actor_rollout_ref__rollout__"
LOOP = '''
import os, signal
from pathlib import Path
from paceline.agents import AgentLoop

class Mortal(AgentLoop):
    """One turn; the first time that it sees row 9, its process dies."""

    async def run(self, request, generate):
        conversation = request.begin()
        died = Path(__file__).with_name("died")
        if request.row["index"] == 9 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await generate(conversation)
        return conversation
'''


@pytest.mark.slow
def test_a_run_whose_agent_is_killed_goes_on_as_if_it_had_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the critic on a device of its own, and two agents; against single turns without any."""
    material = make_material(tmp_path / "material")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: mortal, _target_: {tmp_path}/loop.py:Mortal}}\n")
    settings = {"trainer__total_training_steps": 4, "trainer__save_freq": 1}
    train_in_process(base_config(material, tmp_path / "undisturbed", **settings))
    agents = {
        "trainer__placement__name": "split",
        "trainer__n_gpus_per_node": 2,
        "trainer__max_restarts": 1,
        f"{ROLLOUT}agent__num_workers": 2,
        f"{ROLLOUT}agent__default_agent_loop": "mortal",
        f"{ROLLOUT}agent__agent_loop_config_path": str(tmp_path / "loops.yaml"),
    }
    ray.init("local", num_cpus=2, include_dashboard=False)
    try:
        run_ppo(as_omegaconf(base_config(material, tmp_path / "disturbed", **settings, **agents)))
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    assert caplog.text.count("starting again from") == 1
    assert "agent rank" in caplog.text
    assert "was killed by SIGKILL" in caplog.text
    assert results(tmp_path / "disturbed", "agent/", "val-aux/agent/") == results(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_a_streaming_run_whose_agent_is_killed_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, apart: bool
) -> None:
    """While the rollout samples beside the calls, and while it samples in a call that waits for the agents."""
    material = make_material(tmp_path / "material")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: mortal, _target_: {tmp_path}/loop.py:Mortal}}\n")
    agents = {
        "trainer__total_training_steps": 4,
        "trainer__save_freq": 1,
        "trainer__max_restarts": 1,
        "trainer__schedule__name": "streaming",
        "trainer__schedule__max_staleness": 1,
        f"{ROLLOUT}agent__num_workers": 2,
        f"{ROLLOUT}agent__default_agent_loop": "mortal",
        f"{ROLLOUT}agent__agent_loop_config_path": str(tmp_path / "loops.yaml"),
    }
    if apart:
        agents |= {"trainer__n_gpus_per_node": 2, "trainer__placement__rollout_devices": 1}
    ray.init("local", num_cpus=2, include_dashboard=False)
    try:
        run_ppo(as_omegaconf(base_config(material, tmp_path / "run", **agents)))
    finally:
        ray.shutdown()
    assert caplog.text.count("starting again from") == 1
    assert "was killed by SIGKILL" in caplog.text
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "actor/grad_norm" in line] == [1, 2, 3, 4]
    assert all(line.get("training/staleness/max", 0) <= 1 for line in lines)
