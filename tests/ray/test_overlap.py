"""Split placement pays: what can run at the same time does, and no number changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.timeline import spans
from paceline.trainer.main_ppo import run_ppo
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import as_omegaconf, base_config, make_material, read_metrics, results

STEPS = 3


@pytest.mark.slow
def test_the_two_updates_of_a_split_run_overlap(tmp_path: Path) -> None:
    """Both take far longer than it takes to start them. The first step warms up; of the rest the best counts, since
    whatever else runs on the machine can only lengthen it.
    """
    material = make_material(tmp_path / "material", rows=64, hidden=256)
    config = base_config(
        material,
        tmp_path / "run",
        trainer__placement__name="split",
        trainer__n_gpus_per_node=2,
        trainer__total_training_steps=STEPS,
        trainer__val_before_train=False,
        data__train_batch_size=64,
        data__max_response_length=128,
        actor_rollout_ref__rollout__ignore_eos=True,
        actor_rollout_ref__actor__ppo_mini_batch_size=32,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=16,
        critic__ppo_micro_batch_size_per_gpu=16,
    )
    run_ppo(as_omegaconf(config))
    ratios = []
    for step in range(2, STEPS + 1):
        updates = [*spans(tmp_path / "run" / "timeline.json", "update_actor", step)]
        updates += spans(tmp_path / "run" / "timeline.json", "update_critic", step)
        assert len(updates) == 2
        durations = [end - start for start, end in updates]
        assert min(durations) > 0.2, durations
        both = max(end for _, end in updates) - min(start for start, _ in updates)
        ratios.append(both / max(durations))
    assert min(ratios) <= 1.15, ratios


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gae", "grpo"])
@pytest.mark.parametrize("reward_model", [False, True], ids=["rules", "reward_model"])
def test_the_three_settings_of_overlap_give_the_same_numbers(
    tmp_path: Path, algorithm: str, reward_model: bool
) -> None:
    make = (make_mixed_material, mixed_config) if reward_model else (make_material, base_config)
    material = make[0](tmp_path / "material")
    lines = {}
    for overlap in ("full", "updates", "none"):
        changes = {
            "trainer__overlap": overlap,
            "trainer__placement__name": "split",
            "trainer__n_gpus_per_node": 2,
            "trainer__save_freq": 2,
            "trainer__test_freq": 2,
            "trainer__total_training_steps": 4,
            "algorithm__adv_estimator": algorithm,
            "actor_rollout_ref__rollout__n": 2 if algorithm == "grpo" else 1,
        }
        run_ppo(as_omegaconf(make[1](material, tmp_path / overlap, **changes)))
        lines[overlap] = results(tmp_path / overlap)
        assert "perf/overlap" in read_metrics(tmp_path / overlap)[-1]
    assert len(lines["full"]) == 5
    assert lines["full"] == lines["updates"] == lines["none"]
