"""JSON lines, JSON and CSV give the same prompts and columns as parquet."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataConfig
from paceline.config.checks import validate
from paceline.config.tables import read_table, table_head
from paceline.data.rl_dataset import RLHFDataset
from paceline.errors import ConfigError, DataError
from tests.stand_ins import write_model_folder
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f'{number}+1, "please"\n'}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": f"0{number}"},
        "extra_info": {"day": "2020-01-01"},
    }
    for number in range(3)
]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            flat = ["reward_model.style", "reward_model.ground_truth", "extra_info.day"]
            writer.writerow(["prompt", "data_source", *flat])
            for row in ROWS:
                nested = [*row["reward_model"].values(), *row["extra_info"].values()]
                writer.writerow([json.dumps(row["prompt"]), row["data_source"], *nested])
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "A.CSV"])
def test_every_format_gives_what_parquet_gives(tmp_path: Path, name: str) -> None:
    config = DataConfig(max_prompt_length=64, return_raw_chat=True)
    wanted = RLHFDataset(write(tmp_path / "a.parquet"), TOKENIZER, config)
    found = RLHFDataset(write(tmp_path / name), TOKENIZER, config)
    assert len(found) == len(wanted) == 3
    for mine, other in zip(found, wanted, strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert bool((value == other[key]).all()) if key.endswith(("ids", "mask")) else value == other[key]
    assert len(RLHFDataset([tmp_path / "a.parquet", tmp_path / name], TOKENIZER, config, max_samples=4)) == 4


def test_a_string_in_csv_is_a_prompt_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,data_source\n1+1=,\n[2],x\n")
    dataset = RLHFDataset(tmp_path / "a.csv", TOKENIZER, DataConfig(max_prompt_length=8, return_raw_chat=True))
    assert [row["raw_prompt"] for row in dataset] == ["1+1=", "[2]"]
    assert dataset.column("data_source") == [None, "x"]


def test_late_fields_and_columns_of_json_are_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "1"}, "x": 1}] * 12_000
    rows += [{"prompt": "a", "reward_model": {"ground_truth": "2", "style": "rule"}, "x": 0.5, "late": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = read_table(str(tmp_path / "a.jsonl"))
    assert table.slice(12_000).to_pylist() == rows[-1:]
    assert table_head(str(tmp_path / "a.jsonl")) == (12_001, ["prompt", "reward_model", "x", "late"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt"', "is not JSON in line 2"),
        ("a.jsonl", b'{"prompt": "a"}\n[1]', "has no JSON object in line 2, but [1]"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": 1}', "has a column that can't be read"),
        ("a.jsonl", b'{"prompt": "\xff"}', "can't be read as text"),
        ("a.json", b"[1]", "has no JSON object in item 1"),
        ("a.csv", b"prompt,prompt\na,b\n", "has the column 'prompt' more than once"),
        ("a.csv", b"prompt,x\na\n", "has 1 cells in row 1 and 2 columns"),
        ("a.csv", b'prompt\n"a', "is not CSV in line 2"),
        ("a.csv", b"prompt,x,x.y\na,b,c\n", "has a column 'x.y'"),
        ("a.txt", b"prompt\n", "is no data file"),
    ],
)
def test_a_file_that_cant_be_read_is_named_by_the_checks_and_by_the_dataset(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        RLHFDataset(tmp_path / name, TOKENIZER, DataConfig())
    assert f"{tmp_path / name} {message}" in str(caught.value)
    config = {
        "data": {"train_files": str(tmp_path / name)},
        "actor_rollout_ref": {"model": {"path": str(write_model_folder(tmp_path / "model"))}},
    }
    with pytest.raises(ConfigError) as listed:
        validate(config)
    [problem] = listed.value.problems
    assert f"data.train_files: {tmp_path / name} {message}" in problem


def test_columns_that_are_there_twice_are_reported_of_parquet(tmp_path: Path) -> None:
    column = pa.array(["a", "b"])
    pq.write_table(pa.Table.from_arrays([column, column, column], ["prompt", "x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column names more than once, such as 'x'"):
        RLHFDataset(tmp_path / "a.parquet", TOKENIZER, DataConfig())
