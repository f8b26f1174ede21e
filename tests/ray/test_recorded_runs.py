"""Runs on Ray that are recorded, and replayed in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.main_ppo import run_ppo
from tests.runs import as_omegaconf, base_config, make_material

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "split, one rank each": (
        {"trainer__n_gpus_per_node": 2, "trainer__placement__name": "split"},
        "replay: equal to the last bit",
    ),
    "streaming, a rollout beside the training": (
        {
            "trainer__n_gpus_per_node": 3,
            "trainer__cpus_per_device": 0.5,
            "trainer__placement__name": "split",
            "trainer__placement__rollout_devices": 1,
            "trainer__schedule__name": "streaming",
            "trainer__schedule__max_staleness": 1,
            "actor_rollout_ref__actor__use_kl_loss": False,
        },
        "replay: equal to the last bit",
    ),
    "two ranks": (
        {
            "trainer__n_gpus_per_node": 2,
            "actor_rollout_ref__actor__strategy": "fsdp2",
            "critic__strategy": "fsdp2",
        },
        "replay: equal within rtol",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_run_is_replayed_without_ray(way: str, tmp_path: Path) -> None:
    changes, wanted = WAYS[way]
    settings = {"trainer__record": "every", "trainer__total_training_steps": 3, "trainer__val_before_train": False}
    run_ppo(as_omegaconf(base_config(make_material(tmp_path), tmp_path / "run", **settings, **changes)))
    code = "import sys; from paceline.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "replay", str(tmp_path / "run"), "--step", "2"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1].startswith(wanted)
