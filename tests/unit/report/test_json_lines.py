from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.report.json_lines import finite, is_number, json_line, read_line


def test_a_row_comes_back_from_its_line() -> None:
    row = {"step": 3, "text": "ä\n", "list": [1, 2.5], "nothing": None, "inside": {"x": True}}
    assert read_line(json_line(row)) == row


def test_arrays_tensors_and_unknown_objects_are_plain_in_a_line() -> None:
    row = {"array": np.array([1.5]), "tensor": torch.tensor(2), "scalar": np.float32(0.5), "path": ValueError("x")}
    assert read_line(json_line(row)) == {"array": [1.5], "tensor": 2, "scalar": 0.5, "path": "x"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_come_back_by_float(value: float) -> None:
    row = read_line(json_line({"loss": value}))
    assert row is not None
    assert str(float(row["loss"])) == str(value)
    assert is_number(row["loss"])
    assert finite(row["loss"]) is None


@pytest.mark.parametrize("line", [b"", b'{"step": 3, "lo', b"[1]\n", b"\xff\n"])
def test_a_line_without_a_row_is_none(line: bytes) -> None:
    assert read_line(line) is None
