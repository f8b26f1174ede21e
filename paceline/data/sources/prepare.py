"""The preparation itself: records in, parquet files out, every row accounted for."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.sources.base import MalformedRow, Row, Source, UnusableRow
from paceline.data.sources.source_files import SPLITS, InputFile, read_records
from paceline.errors import DataError
from paceline.files import sync

logger = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]

ROWS_PER_GROUP = 2000
"""Rows that are held in memory before they are written."""
_SHOWN = 20
_PROGRESS_SECONDS = 10.0


@dataclass
class SplitReport:
    """What became of the records of one split."""

    path: Path | None = None
    """The prepared file; None if no row was kept."""
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""


def prepare(
    source: Source, files: Sequence[InputFile], output: str | Path, on_error: OnError = "stop"
) -> dict[str, SplitReport]:
    """Write `output/<split>.parquet` for every split of `files`; gives a report for each.

    Rows are streamed, so memory does not grow with the files. All files are written under temporary names, and get
    their own when every one of them is complete; one of an earlier preparation is replaced then.

    Args:
        on_error: at a malformed row, `stop` raises a `DataError` with its file and line, and writes nothing;
            `skip` logs it, counts it and goes on. Rows that are well-formed but of no use are counted in both.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error={on_error!r}; choose stop or skip.")
    folder = Path(output).expanduser()
    _check_output(folder, files)
    reports: dict[str, SplitReport] = {}
    with ExitStack() as stack:
        writers: dict[str, _Writer] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                report = reports.setdefault(file.split, SplitReport())
                if file.split not in writers:
                    path = folder / f"{file.split}.parquet"
                    writers[file.split] = stack.enter_context(_Writer(path, source.schema))
                _convert_file(source, file, report, writers[file.split], on_error)
            _check_kept(source, reports)
            for split, writer in writers.items():
                if reports[split].kept:
                    writer.finish()
                else:
                    logger.warning("no row of %s %s was kept, so there is no file for it", source.name, split)
            for split, writer in writers.items():
                if reports[split].kept:
                    reports[split].path = writer.publish()
        except OSError as error:
            raise DataError(f"The prepared files can't be written to {folder}: {error}") from error
    return {split: reports[split] for split in SPLITS if split in reports}


def _convert_file(source: Source, file: InputFile, report: SplitReport, writer: _Writer, on_error: OnError) -> None:
    last_report = time.monotonic()
    for number, record in read_records(file):
        index = report.read
        report.read += 1
        try:
            if isinstance(record, MalformedRow):
                raise record
            writer.add(source.row(record, file.split, index))
            report.kept += 1
        except UnusableRow as unusable:
            report.dropped[str(unusable)] += 1
            logger.debug("%s: %s", file.place(number), unusable)
        except MalformedRow as malformed:
            if on_error == "stop":
                raise DataError(
                    f"{file.place(number)}: {malformed}. Nothing was written. Correct the row, or leave out such rows "
                    "with --on-error skip."
                ) from None
            report.dropped[malformed.reason] += 1
            _show_skipped(file, number, malformed, report.dropped[malformed.reason])
        if time.monotonic() - last_report > _PROGRESS_SECONDS:
            last_report = time.monotonic()
            logger.info("%s: %s so far: %d read, %d kept", file.place(number), file.split, report.read, report.kept)
    logger.info("%s: done; %s so far: %d read, %d kept", file.path, file.split, report.read, report.kept)


def _show_skipped(file: InputFile, number: int, malformed: MalformedRow, count: int) -> None:
    logger.log(logging.WARNING if count <= _SHOWN else logging.DEBUG, "skipped %s: %s", file.place(number), malformed)
    if count == _SHOWN:
        logger.warning("further rows with %s are counted, but not shown", malformed.reason)


def _check_output(folder: Path, files: Sequence[InputFile]) -> None:
    """An original must not be taken for a prepared file at the next run, nor be overwritten."""
    for file in files:
        if folder.resolve() == file.path.absolute().parent.resolve():
            raise DataError(f"The output folder {folder} holds the original {file.path.name}; choose another.")


def _check_kept(source: Source, reports: dict[str, SplitReport]) -> None:
    if any(report.kept for report in reports.values()):
        return
    reasons = sum((report.dropped for report in reports.values()), Counter[str]())
    why = "; ".join(f"{count} rows: {reason}" for reason, count in reasons.most_common(5)) or "the files are empty"
    raise DataError(f"No row of {source.name} was kept, so nothing was written: {why}.")


class _Writer:
    """A parquet file under a temporary name, in row groups; leaving the context removes what was not published."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        # Not *.parquet: a glob of data files must not find it.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._rows: list[Row] = []

    def __enter__(self) -> _Writer:
        self._sink = self._temporary.open("wb")
        self._parquet = pq.ParquetWriter(self._sink, self._schema)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ValueError):  # of a file that nobody wants any more
            self._parquet.close()
        self._sink.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def finish(self) -> None:
        """Bring everything to the disk."""
        self._flush()
        self._parquet.close()
        self._sink.close()
        sync(self._temporary)

    def publish(self) -> Path:
        """Give the finished file its name."""
        self._temporary.replace(self._path)
        sync(self._path.parent)
        return self._path
