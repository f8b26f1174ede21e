from __future__ import annotations

import numpy as np
import pytest

from paceline.report.validation_metrics import headlines, validation_metrics

# Two prompts with three responses each, given out of order, as shards may come back.
UIDS = ["p", "q", "p", "q", "p", "q"]
SOURCES = ["s"] * 6


def test_mean_best_and_majority_of_two_prompts_by_hand() -> None:
    # p answers 7, 7, 8 and scores 0, 0, 1; q answers 5, 6, 6 and scores 0, 1, 1.
    acc = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    answers = ["7", "5", "7", "6", "8", "6"]
    metrics = validation_metrics(SOURCES, UIDS, {"acc": acc}, n=3, answers=answers)
    assert metrics == {
        "val-core/s/acc/mean@3": pytest.approx((1 / 3 + 2 / 3) / 2),
        "val-aux/s/acc/best@3": 1.0,  # both have a right answer
        "val-aux/s/acc/maj@3": 0.5,  # p's majority is wrong, q's is right
    }


def test_the_mean_is_over_prompts_not_over_responses() -> None:
    scores = {"reward": np.array([1.0, 0.0, 0.0, 0.0])}
    metrics = validation_metrics(["s"] * 4, ["p", "q", "q", "q"], scores, n=3)
    assert metrics["val-core/s/reward/mean@3"] == 0.5


def test_among_answers_that_are_equally_common_the_first_to_come_counts() -> None:
    acc = np.array([0.0, 1.0, 1.0, 0.0])
    metrics = validation_metrics(["s"] * 4, ["p"] * 4, {"acc": acc}, n=4, answers=["a", "b", "b", "a"])
    assert metrics["val-aux/s/acc/maj@4"] == 0.0
    metrics = validation_metrics(["s"] * 4, ["p"] * 4, {"acc": acc}, n=4, answers=["a", "b", "b", "c"])
    assert metrics["val-aux/s/acc/maj@4"] == 1.0


def test_a_response_without_an_answer_has_no_vote() -> None:
    acc = np.array([0.0, 0.0, 1.0])
    metrics = validation_metrics(["s"] * 3, ["p"] * 3, {"acc": acc}, n=3, answers=["", None, "4"])
    assert metrics["val-aux/s/acc/maj@3"] == 1.0
    metrics = validation_metrics(["s"] * 3, ["p"] * 3, {"acc": acc}, n=3, answers=["", "", ""])
    assert metrics["val-aux/s/acc/maj@3"] == 0.0


def test_a_source_whose_scorer_reads_no_answer_has_no_majority() -> None:
    sources, uids = ["s", "s", "t", "t"], ["0", "0", "1", "1"]
    metrics = validation_metrics(sources, uids, {"reward": np.ones(4)}, n=2, answers=["4", "4", None, float("nan")])
    assert {name for name in metrics if "/maj@" in name} == {"val-aux/s/reward/maj@2"}
    assert "val-aux/t/reward/best@2" in metrics
    assert not any("/maj@" in name for name in validation_metrics(sources, uids, {"reward": np.ones(4)}, n=2))


def test_of_one_response_there_is_only_the_mean() -> None:
    scores = {"reward": np.array([1.0, 0.5]), "acc": np.array([1.0, 0.0])}
    metrics = validation_metrics(["s", "t"], ["0", "1"], scores, n=1, answers=["4", "5"])
    assert metrics == {
        "val-core/s/reward/mean@1": 1.0,
        "val-core/s/acc/mean@1": 1.0,
        "val-core/t/reward/mean@1": 0.5,
        "val-core/t/acc/mean@1": 0.0,
    }


def test_other_scores_than_reward_and_accuracy_are_no_headline() -> None:
    metrics = validation_metrics(["s"], ["0"], {"tests_passed": np.array([0.25])}, n=1)
    assert metrics == {"val-aux/s/tests_passed/mean@1": 0.25}


def test_headlines_are_accuracies_and_the_rewards_of_sources_without_one() -> None:
    names = ["step", "val-core/a/reward/mean@1", "val-core/a/acc/mean@1", "val-core/b/reward/mean@1", "val-aux/a/acc/x"]
    assert headlines(names) == ["val-core/a/acc/mean@1", "val-core/b/reward/mean@1"]
