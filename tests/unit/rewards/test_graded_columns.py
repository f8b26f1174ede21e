"""Columns and metrics of graded rows."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import RewardError
from paceline.rewards.graded_columns import columns_of, columns_of_batch, reward_metrics

FAILED = {"score": 0.0, "grader_error": True, "has_rule": True, "empty": False, "error": "ConnectionError('down')"}
RIGHT = {"score": 1.0, "grader_error": False, "has_rule": True, "empty": False, "error": None, "acc": 1.0}
EMPTY = {"score": 0.0, "grader_error": False, "has_rule": True, "empty": True, "error": None}


def test_a_field_that_a_row_lacks_is_nan_among_numbers_and_none_among_others() -> None:
    columns = columns_of([{"score": 1.0, "note": "long"}, {"acc": True}])
    assert columns["score"][0] == columns["acc"][1] == 1
    assert np.isnan(columns["score"][1])
    assert columns["note"].tolist() == ["long", None]


def test_a_batch_of_which_every_graded_row_failed_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"failed for all 2 responses.*ConnectionError.*reward_model.on_error"):
        columns_of_batch([FAILED, EMPTY, FAILED], ["a", "a", "b"], all_may_fail=False)


@pytest.mark.parametrize(
    ("rows", "all_may_fail"),
    [([FAILED, FAILED], True), ([FAILED, RIGHT], False), ([FAILED, EMPTY], False), ([{"score": 0.0}] * 2, False)],
)
def test_one_failure_or_one_that_was_allowed_is_none(rows: list[dict[str, object]], all_may_fail: bool) -> None:
    info = columns_of_batch(rows, ["a"] * 2, all_may_fail=all_may_fail)
    assert info["score"].tolist() == [row["score"] for row in rows]


def test_a_row_that_failed_counts_as_wrong_where_its_source_has_an_accuracy() -> None:
    info = columns_of_batch([RIGHT, FAILED, FAILED], ["a", "a", "b"], all_may_fail=False)
    assert info["acc"][:2].tolist() == [1.0, 0.0]
    assert np.isnan(info["acc"][2])
    metrics = reward_metrics(["a", "a", "b"], info)
    assert metrics["reward/a/acc"] == 0.5
    assert "reward/b/acc" not in metrics
