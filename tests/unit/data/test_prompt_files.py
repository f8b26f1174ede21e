"""Which columns of a file are read, and that the others cost nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataConfig
from paceline.data import RLHFDataset, prompt_files
from paceline.errors import ConfigError, DataError
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
ALWAYS = {
    "data_source": "x",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"index": 7},
    "ability": "math",
    "scorer": "mine",
}


def write(path: Path, rows: int = 2, **columns: Any) -> Path:
    """A file with `rows` equal rows."""
    pq.write_table(pa.Table.from_pylist([{"prompt": "hi", **columns}] * rows), path, use_dictionary=False)
    return path


def read(files: Path | list[Path], max_samples: int = -1, **changes: Any) -> RLHFDataset:
    return RLHFDataset(files, TOKENIZER, DataConfig(max_prompt_length=8, **changes), max_samples)


def extra(dataset: RLHFDataset) -> set[str]:
    return {name for item in dataset for name in item} - {"input_ids", "attention_mask", "position_ids", "index"}


def test_all_columns_are_kept_without_a_word_while_they_are_small(tmp_path, caplog):
    dataset = read(write(tmp_path / "a.parquet", difficulty=0.5, tags=["a", "b"], **ALWAYS), reward_fn_key="scorer")
    assert extra(dataset) == {"difficulty", "tags", *ALWAYS}
    assert caplog.records == []


def test_the_widest_columns_are_left_out_with_their_sizes_and_the_key_that_keeps_them(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prompt_files, "OTHER_COLUMNS_LIMIT", 2**20)
    file = write(tmp_path / "a.parquet", 300, wide="w" * 9000, level=1, wider={"a": ["x" * 4000, "y" * 8000]}, **ALWAYS)
    assert extra(read(file, reward_fn_key="scorer")) == {"level", *ALWAYS}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not read: column 'wider' (3 MiB), column 'wide' (3 MiB). " in record.message
    assert "may take 1 MiB together" in record.message
    assert "data.keep_columns=[level,wide,wider] keeps everything" in record.message


def test_the_limit_is_for_all_files_together(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "OTHER_COLUMNS_LIMIT", 2**20)
    files = [write(tmp_path / f"{name}.parquet", 100, text="t" * 7000) for name in "ab"]
    assert extra(read(files[0])) == {"text"}
    assert extra(read(files)) == set()


def test_only_the_rows_that_are_used_count(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "OTHER_COLUMNS_LIMIT", 2**20)
    file = write(tmp_path / "a.parquet", 1000, text="t" * 7000)
    assert extra(read(file)) == set()
    assert extra(read(file, max_samples=100)) == {"text"}


def test_always_read_columns_are_read_however_wide(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prompt_files, "OTHER_COLUMNS_LIMIT", 1)
    assert extra(read(write(tmp_path / "a.parquet", **ALWAYS), reward_fn_key="scorer")) == set(ALWAYS)
    assert caplog.records == []


def test_keep_columns_keeps_exactly_these_beside_the_always_read_whatever_their_size(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(prompt_files, "OTHER_COLUMNS_LIMIT", 1)
    file = write(tmp_path / "a.parquet", wide="w" * 1000, level=1, data_source="x")
    assert extra(read(file, keep_columns=["wide"])) == {"data_source", "wide"}
    assert extra(read(file, keep_columns=["data_source"])) == extra(read(file, keep_columns=[])) == {"data_source"}
    assert caplog.records == []


def test_a_column_to_keep_that_no_file_has_is_an_error_with_those_that_there_are(tmp_path):
    files = [write(tmp_path / "a.parquet", level=1), write(tmp_path / "b.parquet", wide="w")]
    assert extra(read(files, keep_columns=["wide"])) == {"wide"}
    with pytest.raises(ConfigError, match=r"keep_columns has 'levle', and no file .* they have level, prompt, wide"):
        read(files, keep_columns=["levle"])


def test_a_column_to_keep_may_be_in_the_training_or_the_validation_files_only(tmp_path):
    train, val = write(tmp_path / "train.parquet", level=1), write(tmp_path / "val.parquet")
    config = {"train_files": str(train), "val_files": [str(val)], "keep_columns": ["level"]}
    assert extra(read(train, **config)) == {"level"}
    assert extra(read(val, **config)) == set()
    with pytest.raises(ConfigError, match=r"'more'.* they have level, prompt"):
        read(val, **{**config, "keep_columns": ["more"]})


def test_a_reserved_column_can_be_left_out(tmp_path):
    file = write(tmp_path / "a.parquet", responses="r", level=1)
    with pytest.raises(DataError, match=r"a\.parquet has the column 'responses'.* set data\.keep_columns"):
        read(file)
    assert extra(read(file, keep_columns=["level"])) == {"level"}


def test_column_names_with_dots_are_not_parts_of_others(tmp_path):
    file = write(tmp_path / "a.parquet", **{"a": {"b": 1, "c": 2}, "a.b": 3})
    assert read(file)[0].items() >= {"a": {"b": 1, "c": 2}, "a.b": 3}.items()
    assert extra(read(file, keep_columns=["a.b"])) == {"a.b"}
    assert read(file, keep_columns=["a"])[0]["a"] == {"b": 1, "c": 2}


@pytest.mark.parametrize("options", [{"use_dictionary": True}, {"use_dictionary": False}, {"encoding": "DELTA"}])
@pytest.mark.parametrize("row_group_size", [2, 100])
def test_values_are_the_same_however_the_file_encodes_them(tmp_path, options, row_group_size):
    values = [None, "a", "b", "a", "ccc"]
    nested = [{"q": value, "many": [{"z": value}, {"z": "b"}]} for value in values]
    table = pa.table(
        {
            "prompt": ["hi"] * 5,
            "text": values,
            "large": pa.array(values, pa.large_string()),
            "raw": pa.array([b"1", b"2", None, b"2", b"2"]),
            "category": pa.array(values).dictionary_encode(),
            "nested": nested,
            "map": pa.array([[("k", "v")], [], None, [("k", "v")], []], pa.map_(pa.string(), pa.string())),
        }
    )
    if options == {"encoding": "DELTA"}:
        options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY", "nested.q": "PLAIN"}}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=row_group_size, **options)
    expected = table.drop_columns("prompt").to_pylist()
    for max_samples in (-1, 5, 3, 1):
        dataset = read(tmp_path / "a.parquet", max_samples)
        rows = expected[:max_samples] if max_samples > 0 else expected
        assert [{name: item[name] for name in rows[0]} for item in dataset] == rows
        assert dataset.column("nested") == nested[: len(rows)]


MEMORY_PROGRAM = """
import json, re, sys
from paceline.config import DataConfig
from paceline.data.prompt_files import read_prompt_files

def peak():  # MiB; ru_maxrss would begin with that of the parent process
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

for file, max_samples, keep in json.loads(sys.argv[1]):
    before = peak()
    (source,) = read_prompt_files(file, DataConfig(keep_columns=keep), max_samples)
    row = source.table.slice(0, 1).to_pylist()[0]
    print(json.dumps([peak() - before, source.table.num_rows, len(row.get("wide", ""))]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_a_wide_column_does_not_fill_the_memory(tmp_path):
    """240 MiB, if it were decoded as a whole."""
    table = pa.table({"prompt": ["hi"] * 2500, "wide": pa.repeat("x" * 100_000, 2500)})
    write(tmp_path / "small.parquet", data_source="x")
    options = {"compression": "zstd", "write_batch_size": 50}  # pages, which are decoded as a whole, of 5 MB
    pq.write_table(table, tmp_path / "plain.parquet", use_dictionary=False, **options)
    pq.write_table(table, tmp_path / "dictionary.parquet", use_dictionary=True, **options)
    runs = [
        ("small", -1, None),  # libraries take memory of their own at first use
        ("plain", -1, None),
        ("plain", 100, ["wide"]),
        ("dictionary", -1, None),
    ]
    arguments = json.dumps([(str(tmp_path / f"{name}.parquet"), *rest) for name, *rest in runs])
    command = [sys.executable, "-c", MEMORY_PROGRAM, arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    left_out, cut, repeated = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert left_out[1:] == [2500, 0]
    assert cut[1:] == [100, 100_000]
    assert repeated[1:] == [2500, 100_000]  # stored once, so it counts as small, is kept, and must stay small
    assert max(left_out[0], cut[0], repeated[0]) < 60, (left_out, cut, repeated)


def with_footer(content: bytes, footer: bytes) -> bytes:
    """A parquet file with another footer."""
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return content[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def test_a_footer_that_is_damaged_far_behind_is_an_error_and_does_not_end_the_process(tmp_path):
    """The last of many row groups says of a column that its lists have one level, and not three."""
    rows = [{"prompt": "hi", "reward_model": {"ground_truth": str(number)}} for number in range(40)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=1)
    content = file.read_bytes()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    levels = footer.rindex(b"\x19\x36")  # thrift: field 1 further, a list of three whole numbers
    file.write_bytes(with_footer(content, footer[:levels] + b"\x19\x16" + footer[levels + 4 :]))
    with pq.ParquetFile(file) as damaged, pytest.raises(OSError, match="histogram size mismatch"):
        next(damaged.iter_batches(1, row_groups=[39]))
    with pytest.raises(DataError, match=r"a\.parquet can't be read as parquet: .*histogram size mismatch"):
        read(file)


def test_a_footer_whose_groups_have_other_rows_than_the_file_is_an_error(tmp_path):
    file = write(tmp_path / "a.parquet", rows=5)
    content = file.read_bytes()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    assert footer.count(b"\x16\x0a") >= 2, "5 rows, as thrift writes them"
    file.write_bytes(with_footer(content, footer.replace(b"\x16\x0a", b"\x16\x09", 1)))
    with pytest.raises(DataError, match=r"a\.parquet is a damaged parquet file: its groups do not have the -5 rows"):
        read(file)
