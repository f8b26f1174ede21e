"""Where prompts come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.field_rules import Count, CountOrAll, LocalPath, LocalPaths, WholeNumber


@dataclass(frozen=True)
class DataConfig:
    """Files of prompts, and how prompts become token ids."""

    train_files: LocalPaths | None = None
    """File or files of training prompts: parquet, JSON lines (.jsonl, .json) or CSV; patterns such as data/*.jsonl."""
    val_files: LocalPaths | None = None
    """The same for validation prompts. null: no validation."""
    train_batch_size: Count = 1024
    """Prompts per training step, >= 1."""
    val_batch_size: Count | None = None
    """Prompts per validation batch, >= 1. null: as many as keep the rollout busy and fit its memory. The results
    are the same."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens, after the chat template; >= 1."""
    max_response_length: Count = 512
    """Longest response in tokens, >= 1."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a longer prompt: stop with an error, or drop its start (left), end (right) or middle."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length, and say how many."""
    prompt_key: str = "prompt"
    """Column of the prompt: a chat (list of {role, content}) or a string."""
    reward_fn_key: str = "data_source"
    """Column that names the scorer of a row."""
    keep_columns: list[str] | None = None
    """Columns to keep for rewards, beside prompt_key, reward_fn_key, data_source, reward_model, extra_info and ability.
    null: all others, but the widest are left out, with a warning, if together they would take more than 64 MiB."""
    return_raw_chat: bool = False
    """Keep the chat itself in the batch, as column raw_prompt."""
    shuffle: bool = True
    """Draw training prompts in a seeded random order."""
    seed: WholeNumber | None = None
    """Seed of that order, >= 0. null: trainer.seed."""
    drop_last: bool = False
    """Leave out the last batch of a training epoch if it is smaller than train_batch_size. false: train on it."""
    train_max_samples: CountOrAll = -1
    """Use only this many training prompts, >= 1, or -1: all."""
    val_max_samples: CountOrAll = -1
    """Use only this many validation prompts, >= 1, or -1: all."""
    accept_changed_files: bool = False
    """Resume although training files are no longer those that the checkpoint was trained on: the epoch begins again."""
    cache_dir: LocalPath | None = None
    """Folder that keeps the token ids of prompts for later runs. null: the environment variable PACELINE_CACHE, or
    ~/.cache/paceline without it. Empty: no cache."""
