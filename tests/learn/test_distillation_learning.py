"""Distillation takes a small model to nearly its teacher's score, with fewer sampled tokens than rewards take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.quickstart import task
from paceline.cli.quickstart.model import build_model, build_tokenizer, pretrain
from tests.in_process import train_in_process
from tests.runs import base_config, read_metrics

pytestmark = pytest.mark.slow

ACCURACY = "val-core/paceline/sums/acc/mean@1"
PROMPTS, RESPONSES, STEPS = 40, 8, 24


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that learned the form and the sums; and a student that learned less, in half of the cases in another
    form."""
    folder = tmp_path_factory.mktemp("sums")
    training, held_out = task.split_sums(seed=1)
    task.write_parquet(training, "train", folder / "train.parquet")
    task.write_parquet(held_out, "test", folder / "test.parquet")
    for name, bare, steps in (("teacher", 0.0, 400), ("student", 0.5, 160)):
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(task, "SHARE_OF_BARE_ANSWERS", bare)
            pretrain(model, tokenizer, training, seed=1, num_steps=steps)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def measured(material: Path, run_dir: Path, model: str, **changes: Any) -> list[tuple[float, float]]:
    """Sampled tokens so far, and the accuracy, at each validation."""
    settings = base_config(
        material,
        run_dir,
        actor_rollout_ref__model__path=str(material / model),
        actor_rollout_ref__rollout__n=RESPONSES,
        actor_rollout_ref__actor__ppo_mini_batch_size=PROMPTS // 2,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=None,
        actor_rollout_ref__actor__optim__lr=3e-4,
        actor_rollout_ref__actor__use_kl_loss=False,
        data__train_batch_size=PROMPTS,
        data__max_prompt_length=8,
        data__max_response_length=10,
        trainer__total_training_steps=STEPS,
        trainer__test_freq=1,
    )
    del settings["custom_reward_function.path"]
    train_in_process(settings | {key.replace("__", "."): value for key, value in changes.items()})
    tokens, found = 0.0, []
    for line in read_metrics(run_dir):
        tokens += PROMPTS * RESPONSES * line.get("response_length/mean", 0.0)
        found.append((tokens, line[ACCURACY]))
    return found


def tokens_to(goal: float, course: list[tuple[float, float]]) -> float:
    return next((tokens for tokens, accuracy in course if accuracy >= goal), math.inf)


def test_distillation_reaches_its_teacher_with_fewer_tokens_than_grpo(material: Path, tmp_path: Path) -> None:
    grpo = {"algorithm__adv_estimator": "grpo"}
    [(_, of_teacher)] = measured(material, tmp_path / "teacher", "teacher", **grpo, trainer__val_only=True)
    taught = {
        "distillation__enabled": True,
        "distillation__teacher_models__one__model_path": str(material / "teacher"),
        "distillation__distillation_loss__use_task_rewards": False,
        "distillation__distillation_loss__loss_mode": "k2",
    }
    by_teacher = measured(material, tmp_path / "distill", "student", **taught)
    by_rewards = measured(material, tmp_path / "grpo", "student", **grpo)
    start, goal = by_teacher[0][1], 0.9 * of_teacher
    assert by_rewards[0][1] == start
    assert start < 0.6 * of_teacher
    said = f"teacher {of_teacher}, distillation {by_teacher}, GRPO {by_rewards}"
    assert tokens_to(goal, by_teacher) < tokens_to(goal, by_rewards), said
