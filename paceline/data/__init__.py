"""Prompts: parquet files, chat templates, batches in a resumable order. Loads its modules on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.data.loader import PromptLoader, make_dataloader
    from paceline.data.rl_dataset import RLHFDataset, collate_fn
    from paceline.data.tokenizer import load_tokenizer

_MODULES = {
    "PromptLoader": "loader",
    "RLHFDataset": "rl_dataset",
    "collate_fn": "rl_dataset",
    "load_tokenizer": "tokenizer",
    "make_dataloader": "loader",
}

__all__ = ["PromptLoader", "RLHFDataset", "collate_fn", "load_tokenizer", "make_dataloader"]


def __getattr__(name: str) -> object:
    # Preparing data files needs neither torch nor transformers, which take seconds to import.
    if name in _MODULES:
        return getattr(importlib.import_module(f"paceline.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
