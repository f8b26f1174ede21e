"""Original files: from the hub or a folder, which split each holds, and their records one by one."""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.sources.base import MalformedRow, Record
from paceline.errors import DataError
from paceline.text import shorten

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
SPLITS = ("train", "validation", "test")
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_BATCH = 1000


@dataclass(frozen=True)
class InputFile:
    """A file and the split of its rows."""

    path: Path
    split: str

    def place(self, number: int) -> str:
        """Where record `number`, counted from 1, is.

        >>> InputFile(Path("train.jsonl"), "train").place(7), InputFile(Path("train.parquet"), "train").place(7)
        ('train.jsonl:7', 'train.parquet, row 7')
        """
        return f"{self.path}, row {number}" if self.path.suffix == ".parquet" else f"{self.path}:{number}"


def find_files(
    path: str | Path,
    *,
    split: str | None = None,
    preferred: Sequence[str] = (),
    ignored: Sequence[str] = (),
    output: str | Path | None = None,
) -> list[InputFile]:
    """The file at `path`, or all data files below the folder `path`, each with its split, in alphabetical order.

    Args:
        split: that of all files; by default it is found in their names, or else in those of their folders.
        preferred: patterns of paths in the folder; where some files match, the others are left out.
        ignored: patterns of paths in the folder that are left out.
        output: a folder of prepared files, which are no originals.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise DataError(f"{root} is no {', '.join(SUFFIXES)} file.")
        return [InputFile(root, split or _split_of_file(root))]
    if not root.is_dir():
        raise DataError(
            f"There is no file or folder {str(path)!r} ({root.absolute()}). To get a dataset from the Hugging Face "
            "hub, use --hub instead of --input."
        )
    files = _data_files(root, Path(output).expanduser().resolve() if output is not None else None)
    names = {file: file.relative_to(root).as_posix() for file in files}
    chosen = [file for file in files if not _matches(names[file], ignored)]
    if any(_matches(names[file], preferred) for file in chosen):
        chosen = [file for file in chosen if _matches(names[file], preferred)]
    if len(chosen) < len(files):
        others = ", ".join(names[file] for file in files if file not in chosen)
        logger.info("%s: left out %s", root, shorten(others, 500))
    if not chosen:
        found = ", ".join(sorted(file.name for file in root.iterdir())[:10]) or "nothing"
        raise DataError(f"There is no {', '.join(SUFFIXES)} file of this dataset in {root}; it holds {found}.")
    _check_no_copies(chosen)
    if split is not None:
        return [InputFile(file, split) for file in chosen]
    splits = {file: _split_of_path(names[file]) for file in chosen}
    unknown = [names[file] for file in chosen if splits[file] is None]
    if len(unknown) == len(chosen):
        raise DataError(
            f"The names of {shorten(', '.join(unknown), 300)} in {root} have no split in them "
            f"({', '.join(_SPLIT_WORDS)}). Set --split."
        )
    if unknown:
        logger.warning(
            "%s: left out %s, which have no split in their names; prepare them alone with --split",
            root, shorten(", ".join(unknown), 500),
        )  # fmt: skip
    return [InputFile(file, known) for file, known in splits.items() if known is not None]


def _data_files(root: Path, output: Path | None) -> list[Path]:
    """Files below `root` by their suffix, but for hidden ones and those of the output folder."""
    files = []
    for file in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if hidden or not file.name.endswith(SUFFIXES) or not file.is_file():
            continue
        if output is not None and output != root.resolve() and output in file.absolute().parents:
            continue
        files.append(file)
    return files


def _check_no_copies(files: list[Path]) -> None:
    """The same name with different suffixes is the same data twice."""
    seen: dict[Path, Path] = {}
    for file in files:
        suffix = next(suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if file.name.endswith(suffix))
        stem = file.with_name(file.name.removesuffix(suffix))
        if stem in seen:
            raise DataError(
                f"{seen[stem]} and {file} look like the same rows in two formats; give one of them, or move one away."
            )
        seen[stem] = file


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _split_of_file(file: Path) -> str:
    split = _split_of_path(file.name)
    if split is None:
        raise DataError(f"The name of {file} has no split in it ({', '.join(_SPLIT_WORDS)}). Set --split.")
    return split


def _split_of_path(name: str) -> str | None:
    """The split in a file's name, or else in the name of the innermost folder that has one.

    >>> _split_of_path("data/train-00000-of-00001.parquet"), _split_of_path("hellaswag_val.jsonl")
    ('train', 'validation')
    """
    for part in reversed(name.split("/")):
        found = {_SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", part.lower()) if word in _SPLIT_WORDS}
        if len(found) > 1:
            raise DataError(f"The name {name} names more than one split: {', '.join(sorted(found))}. Set --split.")
        if found:
            return found.pop()
    return None


def download(repo_id: str, patterns: Sequence[str] = (), revision: str | None = None) -> Path:
    """The folder with the dataset's data files, as they are on the hub; files that were downloaded before are kept.

    Args:
        repo_id: `owner/name` of the dataset.
        patterns: which files, such as `data/*`; none means all jsonl, jsonl.gz and parquet files.
        revision: branch, tag or commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    logger.info("downloading %s from the Hugging Face hub", repo_id)
    try:
        folder = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns) or [f"*{suffix}" for suffix in SUFFIXES],
        )
    except GatedRepoError as error:
        raise DataError(
            f"The dataset {repo_id} is gated: accept its terms on the hub and log in (hf auth login). {error}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(f"The Hugging Face hub has no public dataset {repo_id!r}: {error}") from error
    except RevisionNotFoundError as error:
        raise DataError(f"The dataset {repo_id} has no revision {revision!r}: {error}") from error
    except OSError as error:  # of these are all errors of HTTP and of a missing network
        raise DataError(
            f"The dataset {repo_id} can't be downloaded from the Hugging Face hub, and it was not downloaded before: "
            f"{type(error).__name__}: {error} Download its files where there is a network, and give their folder with "
            "--input."
        ) from error
    return Path(folder)


def read_records(file: InputFile) -> Iterator[tuple[int, Record | MalformedRow]]:
    """The records of a file, counted from 1, or what is wrong with one. Lines are counted with blank ones.

    A damaged file ends with the fault, at the place up to which it could be read.
    """
    try:
        if file.path.suffix == ".parquet":
            yield from _read_parquet(file.path)
        else:
            yield from _read_lines(file.path)
    except OSError as error:
        raise DataError(f"{file.path} can't be read: {error}") from error


def _read_lines(path: Path) -> Iterator[tuple[int, Record | MalformedRow]]:
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            yield number + 1, MalformedRow("bad gzip", f"{error}; the rest of the file is lost")


def _parse(line: bytes) -> Record | MalformedRow:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return MalformedRow("bad JSON", str(error))
    if not isinstance(record, dict):
        return MalformedRow("no JSON object", f"the line is {shorten(repr(record))}")
    return record


def _read_parquet(path: Path) -> Iterator[tuple[int, Record | MalformedRow]]:
    number = 0
    with path.open("rb") as stream:
        try:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=_BATCH):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            yield number + 1, MalformedRow("bad parquet", f"{error}; the rest of the file is lost")
