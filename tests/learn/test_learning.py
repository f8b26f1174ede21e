"""Each algorithm raises the reward, and without a learning rate nothing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.in_process import train_in_process
from tests.runs import base_config, make_material, read_metrics

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo with KL in the reward": {
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "actor_rollout_ref__actor__use_kl_loss": False,
    },
    "ppo over several epochs": {
        "actor_rollout_ref__actor__ppo_epochs": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        "actor_rollout_ref__actor__shuffle": True,
        "critic__shuffle": True,
    },
    "grpo": {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 4, "data__train_batch_size": 8},
    "dr. grpo": {
        "algorithm__adv_estimator": "grpo",
        "algorithm__norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm",
        "actor_rollout_ref__rollout__n": 4,
        "data__train_batch_size": 8,
    },
    "dapo": {
        "algorithm__adv_estimator": "grpo",
        "algorithm__filter_groups__enable": True,
        "reward_model__reward_kwargs__overlong_buffer_cfg__enable": True,
        "reward_model__reward_kwargs__overlong_buffer_cfg__len": 2,
        "reward_model__reward_kwargs__overlong_buffer_cfg__penalty_factor": 0.1,
        "actor_rollout_ref__actor__use_kl_loss": False,
        "actor_rollout_ref__actor__clip_ratio_low": 0.2,
        "actor_rollout_ref__actor__clip_ratio_high": 0.28,
        "actor_rollout_ref__rollout__n": 4,
        "data__train_batch_size": 8,
    },
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"), rows=64)


def scores(material: Path, run_dir: Path, **changes: Any) -> list[float]:
    settings: dict[str, Any] = {
        "trainer__total_training_steps": 25,
        "data__train_batch_size": 32,
        "actor_rollout_ref__actor__optim__lr": 3e-3,
        "actor_rollout_ref__actor__ppo_mini_batch_size": changes.get("data__train_batch_size", 32),
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 32,
        "critic__ppo_micro_batch_size_per_gpu": 32,
        "critic__optim__lr": 3e-3,
        "trainer__val_before_train": False,
    }
    train_in_process(base_config(material, run_dir, **(settings | changes)))
    return [line["critic/score/mean"] for line in read_metrics(run_dir)]


FAST = ("ppo", "grpo")
"""The others take their turn in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ALGORITHMS]
)
def test_the_reward_rises(name: str, material: Path, tmp_path: Path) -> None:
    found = scores(material, tmp_path, **ALGORITHMS[name])
    assert np.mean(found[-3:]) > np.mean(found[:3]) + 0.15, found


def test_without_a_learning_rate_the_reward_stays(material: Path, tmp_path: Path) -> None:
    found = scores(material, tmp_path, actor_rollout_ref__actor__optim__lr=0.0, trainer__total_training_steps=12)
    assert abs(np.mean(found[-4:]) - np.mean(found[:4])) < 0.05, found
