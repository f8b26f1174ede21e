"""Bundles of the flight recorder: all that a training step was made of, in records/step_<N> of the run's folder.

    manifest.json             format, step, version, config, what the updates said of themselves, a hash of each file
    columns.safetensors.zst   every column of the batch, numbers and texts, compressed
    base/                     in some: the roles as they were before the step, in folders as of a checkpoint

A bundle is written whole or not at all. Nothing in it is ever run when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from paceline.errors import DataError
from paceline.files import write_atomically
from paceline.protocol import DataProto
from paceline.protocol.disk import can_be_saved, read, write
from paceline.report.json_lines import Row, plain
from paceline.run_folder import MANIFEST

FORMAT = 1
COLUMNS = "columns.safetensors.zst"
BASE = "base"
PREFIX = "step_"
_FOLDER = re.compile(rf"{PREFIX}(\d+)")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read, its files checked against their hashes."""

    folder: Path
    manifest: Row
    columns: DataProto
    extras: dict[str, Any]
    """Other tensors and arrays of the step."""

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def base(self) -> Path | None:
        """The roles before the step, if the bundle has them."""
        return self.folder / BASE if (self.folder / BASE).is_dir() else None


def bundle_name(step: int) -> str:
    return f"{PREFIX}{step}"


def list_bundles(records: Path) -> dict[int, Path]:
    """Step to folder, in order; those that are being written are left out."""
    found = {int(match[1]): path for path in records.glob(f"{PREFIX}*") if (match := _FOLDER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_bundle(
    folder: Path, manifest: Mapping[str, object], columns: DataProto, extras: Mapping[str, object]
) -> None:
    """Complete the hidden folder of a bundle, which may hold a base, and give it its name."""
    unfinished = unfinished_bundle(folder)
    unfinished.mkdir(parents=True, exist_ok=True)
    texts = {name: column for name, column in columns.non_tensor_batch.items() if can_be_saved(column)}
    tensors = dict(columns.batch.items()) if columns.batch is not None else {}
    content = {"tensors": tensors, "non_tensors": texts, "meta": _savable(columns.meta_info), "extras": dict(extras)}
    raw = unfinished / ".columns"
    write(raw, content)
    compressed = unfinished / COLUMNS
    with raw.open("rb") as source, pa.CompressedOutputStream(str(compressed), "zstd") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    raw.unlink()
    left_out = sorted(set(columns.non_tensor_batch) - set(texts))
    whole = {
        "format": FORMAT,
        **manifest,
        "left_out": left_out,
        "files": {name: _hash(unfinished / name) for name in _files(unfinished)},
    }
    write_atomically(unfinished / MANIFEST, json.dumps(plain(whole), indent=1).encode(), durable=False)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def unfinished_bundle(folder: Path) -> Path:
    """Where a bundle lies until it is whole."""
    return folder.with_name(f".{folder.name}.tmp")


def read_manifest(folder: Path) -> Row:
    """A DataError if there is none, or if it is of a newer paceline."""
    try:
        manifest: Row = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no bundle of the flight recorder: {error}.") from None
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder} is a bundle of format {manifest.get('format')}; this paceline reads {FORMAT}.")
    return manifest


def read_bundle(folder: Path) -> Bundle:
    """The bundle, if its files are as they were written."""
    manifest = read_manifest(folder)
    for name, wanted in manifest["files"].items():
        if not (folder / name).is_file():
            raise DataError(f"{folder} is damaged: it has no {name}.")
        if _hash(folder / name) != wanted:
            raise DataError(f"{folder} is damaged: {name} is not what was written.")
    raw = folder.with_name(f".{folder.name}.{os.getpid()}.read")
    try:
        with pa.CompressedInputStream(str(folder / COLUMNS), "zstd") as source, raw.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        content = read(raw)
    finally:
        raw.unlink(missing_ok=True)
    columns = DataProto.from_dict(content["tensors"], content["non_tensors"], content["meta"])
    return Bundle(folder, manifest, columns, content["extras"])


def adopt_base(folder: Path, checkpoint: Path) -> None:
    """Keep the roles of a checkpoint in a bundle, so that it outlives the checkpoint; files are linked if they can."""
    base = folder / BASE
    shutil.copytree(checkpoint, base, copy_function=_link, dirs_exist_ok=True)
    manifest = read_manifest(folder)
    manifest["files"] = {name: _hash(folder / name) for name in _files(folder)}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=False)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _files(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return sorted(str(path.relative_to(folder)) for path in found)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _savable(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if can_be_saved(value)}
