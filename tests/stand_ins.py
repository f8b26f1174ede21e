"""Files that pass for data and a model where nothing loads them: in tests of the checks before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.load import load_config


def write_parquet(path: Path, rows: int = 1) -> Path:
    """A real parquet file with a column `prompt`."""
    pq.write_table(pa.table({"prompt": pa.array(["1+1="] * rows, pa.string())}), path)
    return path


def write_model_folder(folder: Path, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """A folder with the names of a model's files, and nothing in them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    if weights:
        (folder / "model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer.json").touch()
    return folder


def with_changes(config: dict[str, Any], changes: dict[str, Any], files: dict[str, Path]) -> Any:
    """`config` with some keys set; a value such as "{train}" names one of the files."""
    changed = OmegaConf.create(config)
    for key, value in changes.items():
        is_file = isinstance(value, str) and value.startswith("{")
        OmegaConf.update(changed, key, value.format(**files) if is_file else value, force_add=True)
    return changed


def config_with(*overrides: str) -> PPOConfig:
    """The defaults with these overrides, as `trainer.nnodes=2`."""
    return load_config(OmegaConf.from_dotlist(list(overrides)))
