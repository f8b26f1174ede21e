"""What a row must have is asked for in one way, and what it lacks is named with file and line."""

from __future__ import annotations

import logging

import pyarrow.parquet as pq
import pytest

from paceline.errors import DataError
from tests.unit.data.sources.records import (
    ENDINGS,
    GSM8K,
    HELLASWAG,
    MATH,
    ORIGINAL_HH,
    RECORDS,
    run,
    write_lines,
)


def without(record: dict, key: str) -> dict:
    return {name: value for name, value in record.items() if name != key}


MALFORMED = [
    ("gsm8k", b'{"question": ', "bad JSON"),
    ("gsm8k", b"\xff\xfe{}", "bad JSON"),
    ("gsm8k", ["a"], "no JSON object"),
    ("gsm8k", without(GSM8K, "answer"), "no field 'answer'"),
    ("gsm8k", {**GSM8K, "question": None}, "no field 'question'"),
    ("gsm8k", {**GSM8K, "question": 3}, "'question' is not text"),
    ("gsm8k", {**GSM8K, "question": "  "}, "'question' is empty"),
    ("gsm8k", {**GSM8K, "question": "\ud800"}, "'question' is not valid Unicode"),
    ("gsm8k", {**GSM8K, "answer": "It is 3."}, "no '####' in 'answer'"),
    ("gsm8k", {**GSM8K, "answer": "#### many"}, "no number after '####'"),
    ("math", without(MATH, "problem"), "no field 'problem'"),
    ("math", {**MATH, "solution": "It is 3."}, r"no '\boxed' in 'solution'"),
    ("math", {**MATH, "solution": r"It is \boxed{3"}, r"no '\boxed' in 'solution'"),
    ("hellaswag", without(HELLASWAG, "ctx"), "no field 'ctx'"),
    ("hellaswag", without(HELLASWAG, "label"), "no field 'label'"),
    ("hellaswag", {**HELLASWAG, "label": 4}, "'label' is out of range"),
    ("hellaswag", {**HELLASWAG, "label": -1}, "'label' is out of range"),
    ("hellaswag", {**HELLASWAG, "label": ""}, "'label' is not a number"),
    ("hellaswag", {**HELLASWAG, "label": True}, "'label' is not a number"),
    ("hellaswag", without(HELLASWAG, "endings"), "no field 'endings'"),
    ("hellaswag", {**HELLASWAG, "endings": ENDINGS[:3]}, "'endings' is not a list of four"),
    ("hellaswag", {**HELLASWAG, "endings": [*ENDINGS[:3], 4]}, "'endings' is not text"),
    ("hellaswag", {**HELLASWAG, "endings": [*ENDINGS[:3], "[step]"]}, "'endings' has an empty one"),
    ("full_hh_rlhf", without(ORIGINAL_HH, "chosen"), "no field 'chosen'"),
    ("full_hh_rlhf", {**ORIGINAL_HH, "chosen": "Hello"}, "no dialogue of 'Human:' and 'Assistant:'"),
]


@pytest.mark.parametrize(("name", "bad", "reason"), MALFORMED)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_malformed_row_is_reported_with_file_and_line(tmp_path, caplog, name, bad, reason, suffix):
    good = RECORDS[name]
    path = write_lines(tmp_path / f"train{suffix}", [good, b"", bad, good])
    output = tmp_path / "out"
    with pytest.raises(DataError) as error:
        run(name, path, output)
    assert f"{path}:3: {reason}" in str(error.value)
    assert "--on-error skip" in str(error.value)
    assert list(output.iterdir()) == []

    with caplog.at_level(logging.WARNING):
        report = run(name, path, output, on_error="skip")["train"]
    assert f"{path}:3: {reason}" in caplog.text
    assert (report.read, report.kept, dict(report.dropped)) == (3, 2, {reason: 1})
    rows = pq.read_table(report.path).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 2]


def test_many_malformed_rows_of_a_kind_do_not_flood_the_log(tmp_path, caplog):
    path = write_lines(tmp_path / "train.jsonl", [GSM8K, *[{"question": "a"}] * 500])
    with caplog.at_level(logging.WARNING):
        report = run("gsm8k", path, tmp_path / "out", on_error="skip")["train"]
    assert dict(report.dropped) == {"no field 'answer'": 500}
    assert len(caplog.records) == 21
