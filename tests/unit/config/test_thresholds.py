from __future__ import annotations

import pytest

from paceline.config.thresholds import read_bounds, read_rejections
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    "value", ["", "x", "0", "-1", "2_1", "0_1", "0.5_", "_2", "1_2_30", "nan", "inf", "0.5_inf", True]
)
def test_what_is_no_threshold_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match="is not a threshold: write a number above 0, or two as low_up"):
        read_bounds(value)


def test_one_threshold_is_for_all_criteria_and_a_repeated_criterion_counts_once() -> None:
    assert read_rejections(" token_k2 , seq_max_k3,token_k2", 0.1) == [("token_k2", 0.0, 0.1), ("seq_max_k3", 0.0, 0.1)]
    assert read_rejections(None, None) == []


@pytest.mark.parametrize(
    ("criteria", "thresholds", "message"),
    [
        ("sequence", 2.0, "rollout_rs='sequence' is not known"),
        ("seq_max_k1", 2.0, "did you mean seq_max_k"),
        ("token_k1", None, "0 thresholds for 1 criteria"),
        ("token_k1,token_k2,token_k3", "2,3", "2 thresholds for 3 criteria"),
        ("token_k2", "0.1_2", "write the upper bound alone"),
        ("token_k1", "0.5", "so set it to 1 or more"),
    ],
)
def test_criteria_and_thresholds_that_do_not_fit(criteria: str, thresholds: str | float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rejections(criteria, thresholds)
