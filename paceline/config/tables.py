"""Data files as tables: parquet, JSON lines (or a JSON list of objects) and CSV, chosen by the end of the name.

Reads a file's columns and its number of rows without loading more than needed: of parquet the footer. Needs pyarrow,
which is imported when the first file is read.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Format = Literal["parquet", "json", "csv"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
KINDS = "parquet, JSON lines or CSV"
_CHUNK = 10_000
_LONGEST_CELL = 2**31 - 1
_SMALL = 64 * 2**20
"""Bytes of text that are read as a whole for a first look; of a larger file the first rows are."""


def table_format(file: str | Path) -> Format | None:
    """By the name of a file; a parquet file is known by its first bytes, too. None if it is no table.

    >>> table_format("a/train.jsonl"), table_format("a/train.txt")
    ('json', None)
    """
    known = SUFFIXES.get(Path(file).suffix.lower())
    if known is None:
        try:
            with open(file, "rb") as stream:
                return "parquet" if stream.read(4) == b"PAR1" else None
        except OSError:
            return None
    return known


def table_problem(file: str) -> str | None:
    """Why a file that is there can't be read as a table, after its name; None if it can, by a first look."""
    kind = table_format(file)
    if kind is None:
        return f"is no data file. Its name must end with {', '.join(SUFFIXES)}; or convert it with pandas' to_parquet."
    if kind == "parquet":
        with open(file, "rb") as stream:
            head = stream.read(4)
            stream.seek(max(0, os.path.getsize(file) - 4))
            tail = stream.read(4)
        if head != b"PAR1":
            return "is not a parquet file. Convert it, for example with pandas' to_parquet."
        if tail != b"PAR1":
            return "is a damaged parquet file: its end is missing. Write or copy it again."
    try:
        names = table_head(file)[1]
    except DataError as error:
        return str(error).removeprefix(f"{file} ")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return f"has {len(twice)} column names more than once, such as {twice[0]!r}. Rename or drop one of each."
    return None


def table_head(file: str) -> tuple[int, list[str]]:
    """Number of rows and names of columns. Raises a DataError whose text begins with the file's name."""
    status = os.stat(file)
    return _table_head(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _table_head(file: str, modified_ns: int, size: int) -> tuple[int, list[str]]:
    if table_format(file) != "parquet":
        table = read_table(file, None if size <= _SMALL else _CHUNK)
        return table.num_rows if size <= _SMALL else _count_lines(file), list(table.column_names)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.metadata.num_rows, list(parquet.schema_arrow.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{file} is a damaged parquet file: {reason}. Write or copy it again.") from error


def _count_lines(file: str) -> int:
    with open(file, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(2**20), b""))


def read_table(file: str, max_rows: int | None = None) -> pa.Table:
    """The rows of a JSON or CSV file, or its first ones. Raises a DataError that begins with the file's name.

    Nothing is guessed: texts of JSON stay texts, and all cells of a CSV file are. There, an empty cell is null; a
    column `a.b` is field b of column a, as in `reward_model.ground_truth`; and a column whose cells are all JSON
    objects, or all lists of them, as a chat is, becomes those.
    """
    import pyarrow as pa

    rows = _csv_rows(file) if table_format(file) == "csv" else _json_rows(file)
    chunks: list[pa.Table] = []
    try:
        rows = islice(rows, max_rows)
        while chunk := list(islice(rows, _CHUNK)):
            names = dict.fromkeys(name for row in chunk for name in row)
            chunks.append(pa.table({name: pa.array([row.get(name) for row in chunk]) for name in names}))
        return pa.concat_tables(chunks, promote_options="permissive") if chunks else pa.table({})
    except (pa.ArrowException, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{file} has a column that can't be read: {reason}. Give all its rows one type.") from error
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file} can't be read as text: {error}. Write it in UTF-8.") from error


def _json_rows(file: str) -> Iterator[Row]:
    with open(file, encoding="utf-8-sig") as stream:
        first = stream.read(1)
        while first.isspace():
            first = stream.read(1)
        stream.seek(0)
        if first == "[":
            rows = _parse(file, "", stream.read())
            assert isinstance(rows, list)
            yield from (_an_object(file, f"item {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _an_object(file, f"line {number}", _parse(file, f" in line {number}", line))


def _parse(file: str, where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON{where}: {error}. Each line must be one JSON object.") from None


def _an_object(file: str, where: str, row: object) -> Row:
    if not isinstance(row, dict):
        shown = repr(row)[:80]
        raise DataError(
            f"{file} has no JSON object in {where}, but {shown}. Each row must be an object with its columns."
        )
    return row


def _csv_rows(file: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    with open(file, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            names = next(reader, [])
            _check_header(file, names)
            rows = [[cell or None for cell in row] for row in reader if row]
        except csv.Error as error:
            raise DataError(f"{file} is not CSV in line {reader.line_num}: {error}. Quote cells with commas.") from None
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise DataError(
                f"{file} has {len(row)} cells in row {number} and {len(names)} columns. Quote cells with commas."
            )
    columns = {
        name: _objects([row[place] for row in rows]) if "." not in name else [row[place] for row in rows]
        for place, name in enumerate(names)
    }
    for number in range(len(rows)):
        yield _nested({name: cells[number] for name, cells in columns.items()})


def _check_header(file: str, names: list[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file} has the column {twice[0]!r} more than once. Rename or drop one.")
    for name in names:
        outer = name.partition(".")[0]
        if not all(name.split(".")) or (outer != name and outer in names):
            raise DataError(f"{file} has a column {name!r}, which is not a name, or clashes with {outer!r}. Rename it.")


def _objects(cells: Sequence[str | None]) -> Sequence[object]:
    """The cells as JSON, if all are objects or all are lists of objects; else as they are."""
    texts = [cell for cell in cells if cell and cell.lstrip()[:1] in ("{", "[")]
    if not texts or len(texts) < len(cells):
        return cells
    try:
        parsed = [json.loads(text) for text in texts]
    except (ValueError, RecursionError):
        return cells
    are_objects = all(isinstance(value, dict) for value in parsed)
    are_lists = all(isinstance(value, list) and value and all(isinstance(x, dict) for x in value) for value in parsed)
    return parsed if are_objects or are_lists else cells


def _nested(row: Row) -> Row:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    nested: Row = {}
    for name, value in row.items():
        *outer, last = name.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return nested
