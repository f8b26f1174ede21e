"""Runs with the training backends of optional packages, where these are installed: `make test-backends`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.ray.test_rank_counts import assert_alike
from tests.replay import ReplayRunner
from tests.runs import as_omegaconf, base_config, make_material, results

MODEL_TYPES = {"veomni": "qwen3", "megatron": "qwen2", "torchtitan": "qwen3"}
INSTALLED = [name for name in MODEL_TYPES if find_spec(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not INSTALLED, reason="none of these backends is installed: make test-backends"),
]

ACTOR, CRITIC = "actor_rollout_ref__actor__", "critic__"


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def divided(section: str, backend: str) -> dict[str, int]:
    """Both devices hold one model together, if the backend can."""
    return {} if backend == "veomni" else {f"{section}{backend}__tensor_model_parallel_size": 2}


def in_stages(section: str, backend: str) -> dict[str, int]:
    """The layers of one model are divided between both devices, if the backend can."""
    return {f"{section}megatron__pipeline_model_parallel_size": 2} if backend == "megatron" else {}


@pytest.mark.parametrize("backend", INSTALLED)
def test_a_run_trains_as_with_fsdp2_in_every_placement(backend: str, tmp_path: Path) -> None:
    """On recorded responses; the last run goes on from what fsdp2 saved."""
    material = make_material(tmp_path / "material", model_type=MODEL_TYPES[backend])
    changes: dict[str, Any] = {
        "data__train_batch_size": 7,  # does not divide by two ranks
        ACTOR + "ppo_mini_batch_size": 7,
        ACTOR + "strategy": backend,
        CRITIC + "strategy": backend,
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 2,
    }
    fsdp2 = {ACTOR + "strategy": "fsdp2", CRITIC + "strategy": "fsdp2"}
    saved = tmp_path / "fsdp2" / "checkpoints/global_step_1"
    for name, settings in {
        "fsdp2": {**fsdp2, "trainer__save_freq": 1},
        "colocated": {},
        "split": {"trainer__placement__name": "split"},
        "mixed": {**divided(ACTOR, backend), CRITIC + "strategy": "fsdp2"},
        "staged": {**in_stages(ACTOR, backend), **in_stages(CRITIC, backend)},
        "resumed": {
            **divided(ACTOR, backend),
            **divided(CRITIC, backend),
            "trainer__resume_mode": "resume_path",
            "trainer__resume_from_path": str(saved),
        },
    }.items():
        config = base_config(material, tmp_path / name, **{**changes, **settings})
        run_ppo(as_omegaconf(config), task_runner_class=ReplayRunner)
    expected = results(tmp_path / "fsdp2")
    for name in ("colocated", "split", "mixed", "staged"):
        assert_alike(expected, results(tmp_path / name))
    assert_alike(expected[-1:], results(tmp_path / "resumed"))
