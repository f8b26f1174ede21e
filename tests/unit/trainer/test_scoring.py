"""Parts of the scores that an estimator compares one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import RewardError
from paceline.protocol import DataProto
from paceline.trainer.ppo.scoring import reward_components


def graded(*rows: dict[str, Any]) -> DataProto:
    return DataProto.from_dict(non_tensors={"reward_extra_info": np.array([{"score": 1.0, **row} for row in rows])})


def test_each_part_is_a_column_in_the_order_of_the_names() -> None:
    batch = graded({"acc": True, "style": 0.5}, {"acc": False, "style": 2})
    found = reward_components(batch, ["style", "acc", "score"])
    assert list(found) == ["style", "acc", "score"]
    assert [column.tolist() for column in found.values()] == [[0.5, 2.0], [1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("flag", ["empty", "timeout", "grader_error"])
def test_what_was_not_graded_has_zero_in_every_part(flag: str) -> None:
    batch = graded({"acc": 1.0, flag: False}, {flag: True})
    assert reward_components(batch, ["acc"])["acc"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "found"),
    [({}, "it gave score"), ({"acc": "right"}, "it gave 'right'"), ({"acc": float("nan")}, "it gave nan")],
)
def test_a_part_that_is_missing_or_no_number_is_an_error(row: dict[str, Any], found: str) -> None:
    with pytest.raises(RewardError, match=f"'acc', and the reward of response 1 has no such number: {found}"):
        reward_components(graded({"acc": 1.0}, row), ["acc"])
