"""Files of prompts: which of their columns are read, and how many of their rows.

The footers of parquet files come first. They say how large each column is, so that one that nobody asked for can't fill
the memory: columns that are left out are never decoded. JSON lines and CSV are read as a whole.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.config import DataConfig
from paceline.config.path_checks import data_files
from paceline.config.tables import read_table, table_format, table_head, table_problem
from paceline.errors import ConfigError, DataError
from paceline.files import exists
from paceline.schema import COLUMNS

logger = logging.getLogger(__name__)

ALWAYS_READ = ("data_source", "reward_model", "extra_info", "ability")
"""Columns that are read whatever their size, beside those of `data.prompt_key` and `data.reward_fn_key`."""
OTHER_COLUMNS_LIMIT = 64 * 2**20
"""Bytes that the other columns may take together, over all files, while `data.keep_columns` is not set."""
_BUFFER = 2**16
_LARGEST_DICTIONARY = 2**30
"""Bytes of text in a row group that surely fit a dictionary of Arrow, whose end is at 2 GiB."""
_RESERVED = {"raw_prompt", *(name for name, column in COLUMNS.items() if column.producer != "RLHFDataset")}
"""Columns that the trainer fills; a file that has one would be overwritten."""


@dataclass(frozen=True)
class PromptFile:
    """One file: its columns, and the number of its first row in the dataset before filtering."""

    path: str
    table: pa.Table
    first: int


@dataclass(frozen=True)
class _Head:
    """What the head of a file says: the footer of a parquet file."""

    path: str
    num_rows: int
    """Rows to read, from the first on."""
    sizes: dict[str, int]
    """Bytes that each column takes in memory, for these rows."""
    repeating: list[str]
    """Leaf columns of texts that are stored once each, however often they occur."""
    table: pa.Table | None = None
    """The rows, if reading the head means reading all."""


def read_prompt_files(
    files: str | Path | Sequence[str | Path], config: DataConfig, max_samples: int = -1
) -> list[PromptFile]:
    """The first `max_samples` rows of the files, -1 for all, with the columns that `config` wants."""
    found: list[_Head] = []
    num_rows = 0
    for path in _expand(files):
        found.append(_read_head(path, config.prompt_key, max_samples - num_rows if max_samples >= 0 else None))
        num_rows += found[-1].num_rows
    if not num_rows:
        raise DataError(
            f"There are no prompts in {', '.join(file.path for file in found)} (max_samples={max_samples})."
        )
    columns = _choose_columns(found, config)
    prompt_files: list[PromptFile] = []
    first = 0
    for file in found:
        if file.num_rows:
            prompt_files.append(PromptFile(file.path, _read_columns(file, columns), first))
            _check_source_column(prompt_files[-1], config.reward_fn_key)
            first += file.num_rows
    return prompt_files


def _check_source_column(file: PromptFile, name: str) -> None:
    """What names a row's scorer is text, or missing."""
    if name not in file.table.column_names:
        return
    kind = file.table.schema.field(name).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_null(text)):
        raise DataError(
            f"{file.path} has {kind} in the column {name!r}, which names the scorer of a row as text, such as "
            "'openai/gsm8k'. Write it so, or set data.reward_fn_key to another column."
        )


def _expand(files: str | Path | Sequence[str | Path]) -> list[str]:
    """Existing files, in the given order; the files of a glob in alphabetical order."""
    paths = data_files(files)
    if not paths:
        raise DataError("No data files are given; set data.train_files to a data file.")
    for path in paths:
        if not exists(path):
            absolute = Path(path).expanduser().absolute()
            raise DataError(f"There is no data file {path!r} ({absolute}). Check data.*_files.")
    return paths


@contextmanager
def _open(path: str | io.FileIO, **options: bool | int | list[str]) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, **options) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        name = path if isinstance(path, str) else path.name
        raise DataError(f"{name} can't be read as parquet: {error}") from error


def _read_head(path: str, prompt_key: str, max_rows: int | None) -> _Head:
    if problem := table_problem(path):
        raise DataError(f"{path} {problem}")
    if table_format(path) == "parquet":
        with _open(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            metadata, names = file.metadata, file.schema_arrow.names
            _check_footer(path, metadata)
    else:
        table = read_table(path, max_rows)
        names = table.column_names
    if prompt_key not in names:
        raise DataError(
            f"{path} has no column {prompt_key!r}; it has {', '.join(names) or 'none'}. Set data.prompt_key."
        )
    if table_format(path) != "parquet":
        return _Head(path, table.num_rows, {name: table.column(name).nbytes for name in names}, [], table)
    num_rows = metadata.num_rows if max_rows is None else min(metadata.num_rows, max_rows)
    share = num_rows / max(1, metadata.num_rows)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    sizes, repeating = Counter(dict.fromkeys(names, 0)), []
    for number in range(metadata.num_columns):
        leaf = metadata.schema.column(number)  # of a nested column: one of its parts, such as prompt.list.element.role
        name = max((name for name in names if f"{leaf.path}.".startswith(f"{name}.")), key=len)
        chunks = [group.column(number) for group in groups]
        # However well values are encoded in the file, Arrow has an index or an offset for each.
        sizes[name] += int(share * sum(max(chunk.total_uncompressed_size, 4 * chunk.num_values) for chunk in chunks))
        if leaf.physical_type == "BYTE_ARRAY" and name != prompt_key and _repeats(chunks):
            repeating.append(leaf.path)
    return _Head(path, num_rows, dict(sizes), repeating)


class _BeyondFooterError(Exception):
    """Where a file is read beyond its footer."""


class _FooterOnly(io.FileIO):
    is_known = False

    def read(self, size: int | None = -1) -> bytes:
        if self.is_known:
            raise _BeyondFooterError
        return super().read(-1 if size is None else size)


def _check_footer(path: str, metadata: pq.FileMetaData) -> None:
    """Raise for a damaged one. Asked for its columns, it would end the process: pyarrow raises only before it reads
    rows, when it looks where all columns of all groups are."""
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if min(sizes, default=0) < 0 or sum(sizes) != metadata.num_rows:
        raise DataError(
            f"{path} is a damaged parquet file: its groups do not have the {metadata.num_rows} rows of its footer. "
            "Write or copy it again."
        )
    with _FooterOnly(path) as source, _open(source, pre_buffer=True) as file:
        source.is_known = True
        with suppress(_BeyondFooterError):
            next(file.iter_batches(1), None)


def _repeats(chunks: list[pq.ColumnChunkMetaData]) -> bool:
    """Whether texts are stored by number, each once. Decoded, they could take far more than the footer says."""
    encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
    return (
        any(encoding.endswith("DICTIONARY") for encoding in encodings)
        and not any(encoding.startswith("DELTA") for encoding in encodings)  # pyarrow can't mix the two
        and all(chunk.total_uncompressed_size < _LARGEST_DICTIONARY for chunk in chunks)
    )


def _choose_columns(files: list[_Head], config: DataConfig) -> set[str]:
    always = {config.prompt_key, config.reward_fn_key, *ALWAYS_READ}
    if config.image_key is not None:
        always.add(config.image_key)
        for file in files:
            if config.image_key not in file.sizes:
                raise DataError(
                    f"{file.path} has no column {config.image_key!r} of images; it has "
                    f"{', '.join(sorted(file.sizes))}. Set data.image_key to its name, or leave it out."
                )
    sizes: Counter[str] = Counter()
    for file in files:
        sizes.update(file.sizes)
    if config.keep_columns is None:
        others = {name for name in sizes if name not in always}
    else:
        others = set(config.keep_columns)
        _check_names(config, set(sizes))
    for file in files:
        taken = sorted(_RESERVED.intersection(file.sizes) & (always | others) - {config.prompt_key})
        if taken:
            raise DataError(
                f"{file.path} has the column {taken[0]!r}, which the trainer fills itself. Rename it, or set "
                "data.keep_columns to the columns that rewards need."
            )
    return always | (others if config.keep_columns is not None else _narrowest(others, sizes))


def _check_names(config: DataConfig, known: set[str]) -> None:
    """A column to keep may be in the training files only, or in the validation files only, but not nowhere."""
    wanted = set(config.keep_columns or ())
    if not wanted <= known:
        for files in (config.train_files, config.val_files):
            for path in _expand(files) if files else ():
                known = known.union(table_head(path)[1])
    for name in sorted(wanted - known):
        raise ConfigError(
            f"data.keep_columns has {name!r}, and no file has such a column; they have {', '.join(sorted(known))}."
        )


def _narrowest(names: set[str], sizes: Counter[str]) -> set[str]:
    """As many of the columns as fit into the limit; the widest go first, with a warning."""
    kept = sorted(names, key=lambda name: (sizes[name], name))
    left_out: list[str] = []
    while sum(sizes[name] for name in kept) > OTHER_COLUMNS_LIMIT:
        left_out.append(kept.pop())
    if left_out:
        logger.warning(
            "not read: %s. Columns that are not always read may take %s together. If rewards need more, name all that "
            "they need in data.keep_columns; data.keep_columns=[%s] keeps everything.",
            ", ".join(f"column {name!r} ({_mebibytes(sizes[name])})" for name in left_out),
            _mebibytes(OTHER_COLUMNS_LIMIT),
            ",".join(sorted(names)),
        )
    return set(kept)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _read_columns(file: _Head, columns: set[str]) -> pa.Table:
    names = [name for name in file.sizes if name in columns]
    if file.table is not None:
        return file.table.select(names)
    with _open(file.path, read_dictionary=file.repeating) as parquet:
        # A column named a.b also matches part b of a column named a; select leaves that out again.
        return pa.Table.from_batches(_batches(parquet, names, file.num_rows)).select(names)


def _batches(file: pq.ParquetFile, names: list[str], num_rows: int) -> Iterator[pa.RecordBatch]:
    """The first rows of a file. One batch for each row group, since every batch has its own copy of a dictionary."""
    for group in range(file.num_row_groups):
        size = min(num_rows, file.metadata.row_group(group).num_rows)
        if not size:
            continue
        for batch in file.iter_batches(size, row_groups=[group], columns=names):
            yield batch.slice(0, num_rows)
            num_rows -= min(num_rows, batch.num_rows)
            if not num_rows:
                return
