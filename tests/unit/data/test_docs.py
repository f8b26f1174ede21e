"""The Python of docs/data.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data.prompt_files import ALWAYS_READ, OTHER_COLUMNS_LIMIT
from paceline.data.sources import find_files, get_source, prepare
from tests.tiny import make_tiny_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder with what the page speaks of: a model's tokenizer and prepared data."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path / "models" / "my-model")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_text('{"question": "2+2?", "answer": "It is 4.\\n#### 4"}\n' * 5)
    prepare(get_source("gsm8k"), find_files(tmp_path / "raw"), tmp_path / "data" / "gsm8k")
    return tmp_path


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, "docs/data.md", "exec"), names)
    return names


def block_with(text: str) -> str:
    (block,) = [block for block in BLOCKS if text in block]
    return block


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(home, number):
    run(BLOCKS[number])


def test_the_row_of_the_page_has_the_columns_that_preparation_writes(home):
    shown = eval(block_with('"ability"'))
    (written,) = pq.read_table(home / "data" / "gsm8k" / "train.parquet").slice(0, 1).to_pylist()
    assert list(shown) == list(written)
    for name in ("reward_model", "extra_info"):
        assert list(shown[name]) == list(written[name])


def test_the_file_of_the_page_can_be_read(home):
    run(block_with("write_table"))
    names = run(block_with("make_dataloader").replace("~/data/gsm8k/*.parquet", "train.parquet"))
    assert len(names["dataset"]) == pq.read_metadata("train.parquet").num_rows
    assert set(names["batch"]) >= {"input_ids", "data_source", "reward_model"}


def test_the_page_names_every_column_that_is_always_read():
    assert all(f"| `{name}` |" in PAGE for name in ("prompt", *ALWAYS_READ))
    assert f"{OTHER_COLUMNS_LIMIT // 2**20} MiB" in PAGE


def test_the_loop_of_the_page_sees_every_row(home):
    pq.write_table(pa.table({"prompt": ["only", "prompts"]}), home / "data" / "gsm8k" / "more.parquet")
    names = run(block_with("make_dataloader"))
    assert len(names["dataset"]) == 7
