"""Training and validation files: that they can be read, and have the rows and columns that the run needs."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.keys import value_of
from paceline.config.path_checks import data_files, readable_head, table_problems


def check_data(cfg: PPOConfig) -> Iterator[str]:
    data = cfg.data
    if not data.train_files:
        yield "data.train_files is not set; set it to a data file (parquet, JSON lines, CSV) or a list of them."
    for key in ("data.train_files", "data.val_files"):
        for file in data_files(value_of(cfg, key)):
            yield from table_problems(key, file)
    for key in ("data.prompt_key", "data.reward_fn_key"):
        if not value_of(cfg, key):
            yield f"{key} is empty; set it to the name of a column."
    if data.drop_last and 0 < data.train_max_samples < data.train_batch_size:
        yield (
            f"data.drop_last=True leaves nothing to train on: data.train_max_samples={data.train_max_samples} is less "
            f"than one batch of data.train_batch_size={data.train_batch_size}. Set data.drop_last=False."
        )


def check_columns(cfg: PPOConfig) -> Iterator[str]:
    """What the footers of the data files say: no row, no prompts, less than a batch, no such column to keep."""
    data = cfg.data
    seen: set[str] = set()
    all_read = True
    for key in ("data.train_files", "data.val_files"):
        files = data_files(value_of(cfg, key))
        footers = {file: footer for file in files if (footer := readable_head(file))}
        all_read = all_read and len(footers) == len(files)
        seen.update(name for _, columns in footers.values() for name in columns)
        lacking = [file for file, (_, columns) in footers.items() if data.prompt_key not in columns]
        if lacking and data.prompt_key:
            columns = footers[lacking[0]][1]
            yield (
                f"data.prompt_key={data.prompt_key}: {lacking[0]} has no such column. Set it to one of those that it "
                f"has: {', '.join(columns)}."
            )
        rows = sum(rows for rows, _ in footers.values())
        if footers and not rows:
            yield f"{key}: there are no rows in {', '.join(footers)}. Set it to files that have some."
        elif key == "data.train_files" and footers and data.drop_last and rows < data.train_batch_size:
            yield (
                f"data.drop_last=True leaves nothing to train on: {key} has {rows} rows, less than one batch of "
                f"data.train_batch_size={data.train_batch_size}. Set data.drop_last=False or a smaller batch."
            )
    if seen and all_read and (missing := sorted(set(data.keep_columns or ()) - seen)):
        yield (
            f"data.keep_columns has {', '.join(missing)}, and no file has such a column; they have "
            f"{', '.join(sorted(seen))}."
        )
