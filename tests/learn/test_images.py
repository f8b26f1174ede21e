"""Prompts with images: a tiny model of images and text learns to name a colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.in_process import train_in_process
from tests.runs import base_config, read_metrics
from tests.tiny_vl import make_tiny_vl_model, write_colours

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the letter of the colour at the beginning; a letter of another colour is better than none."""
    first = solution_str[:1]
    return 1.0 if first == ground_truth else 0.2 if first and first in "rgb" else 0.0
'''


def image_config(folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """A run of GRPO on the colours in `folder`."""
    config = base_config(folder, run)
    return {key: value for key, value in config.items() if not key.startswith("critic.")} | {
        "data.image_key": "images", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 8, "data.train_batch_size": 12, "data.max_prompt_length": 40,
        "data.max_response_length": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 12,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 48, "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.optim.lr": 3e-3, "trainer.total_training_steps": 60, "trainer.val_before_train": True,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip


def make_colours(folder: Path) -> Path:
    """A folder with model, rows and reward."""
    folder.mkdir(exist_ok=True)
    make_tiny_vl_model(folder / "model")
    write_colours(folder / "train.parquet", 48)
    write_colours(folder / "test.parquet", 12, seed=1)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colours(tmp_path_factory.mktemp("colours"))


def test_a_model_of_images_learns_to_name_a_colour(material: Path, tmp_path: Path) -> None:
    train_in_process(image_config(material, tmp_path / "run", trainer__test_freq=60))
    lines = read_metrics(tmp_path / "run")
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert sum(scores[-5:]) / 5 > 0.9
    assert sum(scores[:3]) / 3 < 0.5
