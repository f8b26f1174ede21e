"""The sums of the quickstart: who trains on which, and rows that every loader reads."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq

from paceline.cli import quickstart
from paceline.cli.quickstart.task import (
    NUM_TRAINING,
    NUM_VALIDATION,
    Sum,
    pretraining_answer,
    rows,
    split_sums,
    write_parquet,
)
from paceline.rewards.score import gsm8k


def test_validation_sums_are_in_no_training_in_either_order() -> None:
    training, validation = split_sums(seed=3)
    assert (len(training), len(validation)) == (NUM_TRAINING, NUM_VALIDATION)
    trained = {frozenset((item.left, item.right)) for item in training}
    assert len(trained) == NUM_TRAINING
    assert not trained & {frozenset((item.left, item.right)) for item in validation}


def test_split_depends_on_the_seed_alone() -> None:
    assert split_sums(seed=3) == split_sums(seed=3)
    assert split_sums(seed=3) != split_sums(seed=4)


def test_steps_of_an_epoch_are_all_of_full_size() -> None:
    config = quickstart.compose_config("colocated", [])
    assert NUM_TRAINING % config.data.train_batch_size == 0


def test_half_of_the_answers_to_learn_have_the_format_that_scores() -> None:
    rng = random.Random(0)
    training, _ = split_sums(seed=1)
    answers = [(item, pretraining_answer(item, rng)) for item in training]
    scores = [gsm8k.compute_score(answer, item.answer) for item, answer in answers]
    assert 0.45 < sum(scores) / len(scores) < 0.55
    assert all(answer.removeprefix("#### ") == item.answer for item, answer in answers)


def test_rows_are_gsm8k_style_and_survive_parquet(tmp_path: Path) -> None:
    sums = [Sum(12, 7), Sum(99, 9)]
    write_parquet(sums, "test", tmp_path / "new" / "test.parquet")
    stored = pq.read_table(tmp_path / "new" / "test.parquet").to_pylist()
    assert stored == rows(sums, "test")
    assert stored[0] == {
        "data_source": "paceline/sums",
        "prompt": [{"role": "user", "content": "12+7="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "19"},
        "extra_info": {"split": "test", "index": 0},
    }
