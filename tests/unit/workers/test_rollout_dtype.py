"""Which numbers a worker's rollout engine computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import ActorRolloutRefConfig, PolicyModelConfig, RolloutConfig
from paceline.workers.engine_workers import ActorRolloutRefWorker, RunContext
from tests.tiny import make_tiny_model

RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=4, max_response_length=4)


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize(
    ("compute_dtype", "dtype", "expected"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_those_of_the_actor_unless_it_has_a_setting_of_its_own(
    tmp_path: Path, name: str, compute_dtype, dtype, expected: torch.dtype
) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1)
    config = ActorRolloutRefConfig(
        model=PolicyModelConfig(path=str(folder), compute_dtype=compute_dtype),
        rollout=RolloutConfig(name=name, dtype=dtype),
    )
    worker = ActorRolloutRefWorker(config, "rollout", RUN)
    worker.init_model()
    assert worker.rollout.dtype == expected
    assert worker.rollout.model.dtype == torch.float32
