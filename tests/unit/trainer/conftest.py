from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import write_sums
from tests.tiny import make_tiny_model


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A configuration that can run."""
    write_sums(tmp_path / "train.parquet", 4)
    make_tiny_model(tmp_path, max_position_embeddings=1024)
    return {
        "data": {"train_files": str(tmp_path / "train.parquet")},
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
    }
