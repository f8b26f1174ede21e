from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What a good configuration refers to, and some things that a bad one does."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    train = tmp_path / "train.parquet"
    train.write_bytes(b"PAR1....PAR1")
    text = tmp_path / "train.jsonl"
    text.write_text("{}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    return {"model": model, "train": train, "text": text, "empty": empty, "missing": tmp_path / "missing"}


@pytest.fixture
def good(files: dict[str, Path]) -> dict[str, Any]:
    """The smallest complete configuration."""
    return {
        "data": {"train_files": str(files["train"])},
        "actor_rollout_ref": {"model": {"path": str(files["model"])}},
    }
