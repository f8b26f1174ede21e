"""Each estimator and each policy loss raises the reward; without a learning rate none would (test_learning)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.learn.test_learning import scores
from tests.runs import make_material, read_metrics

GROUPS = {"actor_rollout_ref__rollout__n": 4, "data__train_batch_size": 8}

ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": GROUPS,
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": GROUPS,
    # A random model's greedy response is one character again and again, all right or all wrong: a baseline far from the
    # mean, which costs steps.
    "remax": {"trainer__total_training_steps": 70},
}

# Two optimizer steps on each batch: in the second the ratios are not 1, so that the losses differ from REINFORCE.
TWO_STEPS = {**GROUPS, "algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__ppo_mini_batch_size": 4}

LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref__actor__clip_ratio": 0.02,
    },
    "cispo": {"actor_rollout_ref__actor__clip_ratio_low": 1.0, "actor_rollout_ref__actor__clip_ratio_high": 0.05},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"), rows=64)


def assert_rises(found: list[float]) -> None:
    assert np.mean(found[-3:]) > np.mean(found[:3]) + 0.15, found


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_reward_rises_with_each_estimator(name: str, material: Path, tmp_path: Path) -> None:
    assert_rises(scores(material, tmp_path, algorithm__adv_estimator=name, **ESTIMATORS[name]))
    assert "critic/vf_loss" not in read_metrics(tmp_path)[-1]


@pytest.mark.parametrize("name", LOSSES)
def test_the_reward_rises_with_each_policy_loss(name: str, material: Path, tmp_path: Path) -> None:
    changes = {**TWO_STEPS, **LOSSES[name], "actor_rollout_ref__actor__policy_loss__loss_mode": name}
    assert_rises(scores(material, tmp_path, **changes))
    clipped = [line["actor/pg_clipfrac"] for line in read_metrics(tmp_path)]
    assert max(clipped) > 0, "nothing was clipped: with ratios of 1 every loss is the same"
