"""Data files that change or vanish while a run goes on, or between two sessions of it.

Prompts and labels are read at the start and stay in memory, so a running run is not disturbed. A resumed one would
read other rows at the position that its checkpoint names.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from paceline.config import DataConfig
from paceline.config.path_checks import data_files
from paceline.config.supervised import TextDataConfig
from paceline.config.tables import table_format
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)


class FileRecord(TypedDict):
    """A file as it was when it was read; one that is not there has neither size nor footer."""

    path: str
    size: int | None
    modified_ns: int
    footer: str


class DataFiles:
    """The files of a run as they were when they were read. `has_own` is False if the dataset did not come from them."""

    def __init__(self, config: DataConfig | TextDataConfig, *, has_own: bool = True) -> None:
        self._accepts_changes = config.accept_changed_files
        self.at_start: dict[str, list[FileRecord]] = {
            key: [_describe(file) for file in data_files(files)] if has_own else []
            for key, files in (("data.train_files", config.train_files), ("data.val_files", config.val_files))
        }
        self._reported: set[str] = set()

    def warn_of_changes(self) -> None:
        """Say once of each file that it is no longer what was read."""
        for records in self.at_start.values():
            for record in records:
                change = _change(record, _describe(record["path"]))
                if change and record["path"] not in self._reported:
                    self._reported.add(record["path"])
                    logger.warning(
                        "%s. This run goes on with what it read at the start; a resumed one would refuse the file",
                        change,
                    )

    def position_after(self, state: Mapping[str, Any], now: Mapping[str, int]) -> dict[str, int]:
        """The position in the data of a checkpoint's `state`, if its files are the files of this run.

        `now` is the state of this run's dataloader, at its beginning. Changed training files are an error, or, with
        data.accept_changed_files, the beginning of the epoch.
        """
        before: dict[str, list[FileRecord]] = state.get("data_files", {})
        for change in self._changes(before, "data.val_files"):
            logger.warning("%s: validation is not comparable with that of earlier steps", change)
        changes = self._changes(before, "data.train_files")
        if not changes:
            return state["dataloader"]
        what = "; ".join(changes)
        if not self._accepts_changes:
            raise CheckpointError(
                f"data.train_files are not those of the checkpoint: {what}. Its position in the data would mean other "
                "prompts. Bring the files back; or set data.accept_changed_files=True to go on with the new ones from "
                "the beginning of the epoch, or trainer.resume_mode=disable to start over."
            )
        logger.warning("%s: accepted; epoch %d begins again", what, state["dataloader"]["epoch"])
        return {**now, "epoch": state["dataloader"]["epoch"], "position": 0}

    def _changes(self, before: dict[str, list[FileRecord]], key: str) -> list[str]:
        """What is different; files are compared in their order, so that they may have moved together."""
        old, new = before.get(key, []), self.at_start[key]
        if not old or not new:  # an older checkpoint, or a dataset of the user's own
            return []
        if len(old) != len(new):
            return [f"{len(old)} files ({_names(old)}) became {len(new)} ({_names(new)})"]
        return [change for was, now in zip(old, new, strict=True) if (change := _change(was, now))]


def _describe(file: str) -> FileRecord:
    """Size and time of a file, and a hash of its footer, which has the place, size and range of every column.

    A file without a footer is hashed as a whole.
    """
    path = Path(file)
    try:
        with path.open("rb") as stream:
            status = path.stat()
            if table_format(file) == "parquet":
                stream.seek(max(0, status.st_size - 8))
                length = int.from_bytes(stream.read(4), "little")
                stream.seek(max(0, status.st_size - 8 - length))
            footer = hashlib.blake2b(stream.read(), digest_size=16).hexdigest()
    except OSError:
        return {"path": file, "size": None, "modified_ns": 0, "footer": ""}
    return {"path": file, "size": status.st_size, "modified_ns": status.st_mtime_ns, "footer": footer}


def _change(was: FileRecord, now: FileRecord) -> str | None:
    """A copy has another time; it is the same file if size and footer are."""
    if now["size"] is None:
        return f"{was['path']} is no longer there"
    if was["size"] != now["size"]:
        return f"{now['path']} had {was['size']} bytes and has {now['size']}"
    return None if was["footer"] == now["footer"] else f"{now['path']} has other content than before"


def _names(records: list[FileRecord]) -> str:
    return ", ".join(Path(record["path"]).name for record in records[:5])
