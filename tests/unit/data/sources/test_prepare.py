"""Rows are written as they are read; a stop harms nothing, and what was dropped is counted."""

from __future__ import annotations

import logging
import sys

import pyarrow.parquet as pq
import pytest

from paceline.data.sources import prepare
from paceline.errors import DataError
from tests.unit.data.sources.records import (
    GSM8K,
    HELLASWAG,
    MATH,
    run,
    write_lines,
)


def test_rows_without_public_labels_or_answers_are_dropped_and_counted(tmp_path):
    write_lines(tmp_path / "hs" / "hellaswag_val.jsonl", [HELLASWAG])
    write_lines(tmp_path / "hs" / "hellaswag_test.jsonl", [{**HELLASWAG, "label": ""}, {**HELLASWAG, "label": None}])
    reports = run("hellaswag", tmp_path / "hs", tmp_path / "out")
    assert list(reports) == ["validation", "test"]
    assert dict(reports["test"].dropped) == {"no label: those of the test split are not public": 2}
    assert reports["test"].path is None
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["validation.parquet"]

    path = write_lines(tmp_path / "train.jsonl", [MATH, {**MATH, "solution": r"It is $\boxed{}$."}])
    assert dict(run("math", path, tmp_path / "out")["train"].dropped) == {r"the solution's '\boxed' is empty": 1}


def test_the_output_is_neither_the_folder_of_the_originals_nor_read_as_one(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [GSM8K])
    with pytest.raises(DataError, match=r"holds the original train\.jsonl"):
        run("gsm8k", tmp_path, tmp_path)
    for _ in range(2):
        assert run("gsm8k", path.parent, tmp_path / "out")["train"].read == 1


def test_a_stop_leaves_the_files_of_an_earlier_preparation_as_they_were(tmp_path):
    output = tmp_path / "out"
    run("gsm8k", write_lines(tmp_path / "a" / "train.jsonl", [GSM8K]), output)
    before = (output / "train.parquet").read_bytes()
    write_lines(tmp_path / "b" / "test.jsonl", [GSM8K])
    write_lines(tmp_path / "b" / "train.jsonl", [GSM8K, {}])
    with pytest.raises(DataError):
        run("gsm8k", tmp_path / "b", output)
    assert [file.name for file in output.iterdir()] == ["train.parquet"]
    assert (output / "train.parquet").read_bytes() == before


def test_nothing_kept_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(DataError, match="2 rows: no field 'question'"):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", [{}, {}]), tmp_path / "out", on_error="skip")
    with pytest.raises(DataError, match="the files are empty"):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", []), tmp_path / "out")


def test_an_output_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "out").write_text("a file, no folder")
    with pytest.raises(DataError, match="can't be written"):
        run("gsm8k", write_lines(tmp_path / "in" / "train.jsonl", [GSM8K]), tmp_path / "out")


def test_rows_are_written_in_groups_while_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[prepare.__module__], "ROWS_PER_GROUP", 10)
    records = [{**GSM8K, "question": str(number)} for number in range(25)]
    run("gsm8k", write_lines(tmp_path / "train.jsonl", records), tmp_path / "out")
    metadata = pq.read_metadata(tmp_path / "out" / "train.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [10, 10, 5]


def test_progress_is_logged_while_a_file_is_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules[prepare.__module__], "_PROGRESS_SECONDS", -1.0)
    with caplog.at_level(logging.INFO):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", [GSM8K] * 3), tmp_path / "out")
    assert "train.jsonl:2: train so far: 2 read, 2 kept" in caplog.text
