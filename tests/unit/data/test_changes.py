"""Data files that change between two sessions of a run."""

from __future__ import annotations

from pathlib import Path

from paceline.config import DataConfig
from paceline.data.changes import DataFiles


def test_a_text_file_that_changes_is_noticed_wherever_it_does(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1", "extra_info": {"day": "2020-01-01"}}\n' * 3)
    config = DataConfig(train_files=str(path))
    before = DataFiles(config).at_start
    path.write_text(path.read_text().replace("2020", "2021", 1))
    assert DataFiles(config)._changes(before, "data.train_files") == [f"{path} has other content than before"]
