"""Prompts: parquet files, chat templates, batches in a resumable order."""

from __future__ import annotations

from paceline.data.loader import PromptLoader, make_dataloader
from paceline.data.rl_dataset import RLHFDataset, collate_fn
from paceline.data.tokenizer import load_tokenizer

__all__ = ["PromptLoader", "RLHFDataset", "collate_fn", "load_tokenizer", "make_dataloader"]
