from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stand_ins import write_model_folder, write_parquet


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a good configuration refers to, and some things that a bad one does. Nothing may be written there."""
    tmp_path = tmp_path_factory.mktemp("config")
    model = write_model_folder(tmp_path / "model")
    no_weights = write_model_folder(tmp_path / "no_weights", weights=False)
    no_tokenizer = write_model_folder(tmp_path / "no_tokenizer", tokenizer=False)
    no_type = write_model_folder(tmp_path / "no_type")
    (no_type / "config.json").write_text("{}")
    half = write_model_folder(tmp_path / "half", weights=False)
    (half / "model-1.safetensors").touch()
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (half / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    train = write_parquet(tmp_path / "train.parquet", 2000)
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(train.read_bytes()[:-10])
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1....PAR1")
    text = tmp_path / "train.txt"
    text.write_text("1+1=\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs):\n    return 0.0\n")
    broken = tmp_path / "broken.py"
    broken.write_text("def compute_score(:\n")
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").touch()
    pruned = tmp_path / "run" / "checkpoints" / "global_step_10"
    pruned.mkdir()
    (pruned / "trainer.pruned.json").touch()
    return {
        "model": model, "no_weights": no_weights, "no_tokenizer": no_tokenizer, "no_type": no_type, "half": half,
        "train": train, "no_rows": write_parquet(tmp_path / "no_rows.parquet", 0), "truncated": truncated,
        "damaged": damaged, "text": text, "empty": empty, "missing": tmp_path / "missing", "reward": reward,
        "broken": broken, "run": tmp_path / "run", "checkpoint": checkpoint, "pruned": pruned,
    }  # fmt: skip


@pytest.fixture
def good(files: dict[str, Path]) -> dict[str, Any]:
    """The smallest complete configuration."""
    return {
        "data": {"train_files": str(files["train"])},
        "actor_rollout_ref": {"model": {"path": str(files["model"])}},
    }
