"""Rows of MATH: the answer is what the last box holds."""

from __future__ import annotations

from tests.unit.data.sources.records import (
    MATH,
    prepared,
)


def test_math_row_has_the_last_boxed_answer(tmp_path):
    [row] = prepared("math", [MATH], tmp_path)
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["reward_model"] == {"style": "rule", "ground_truth": r"\frac{1}{2}"}
    assert row["extra_info"]["level"] == "Level 1"
    assert r"\boxed{}" in row["prompt"][0]["content"]


def test_math_takes_rows_without_level_and_type(tmp_path):
    [row] = prepared("math", [{key: MATH[key] for key in ("problem", "solution")}], tmp_path)
    assert row["extra_info"]["level"] is None
