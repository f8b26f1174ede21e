"""Split placement pays: actor and critic really update at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.timeline import spans
from paceline.trainer.main_ppo import run_ppo
from tests.runs import as_omegaconf, base_config, make_material

STEPS = 3


@pytest.mark.slow
def test_the_two_updates_of_a_split_run_overlap(tmp_path: Path) -> None:
    """Both take a second or more on one thread each. The first step warms up; of the rest the best counts, since
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
        assert min(durations) > 1.0, durations
        both = max(end for _, end in updates) - min(start for start, _ in updates)
        ratios.append(both / max(durations))
    assert min(ratios) <= 1.15, ratios
