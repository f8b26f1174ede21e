"""Checkpoints of a run: complete or absent, never half.

    <run>/checkpoints/
      global_step_20/           actor/  critic/  trainer.json
      latest_checkpointed_iteration.txt      the step of the newest complete one

A checkpoint is written under a temporary name and renamed when all of it is on disk; the pointer moves last. A
run that is killed at any instant finds the one before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.report.files import keep_old

LATEST = "latest_checkpointed_iteration.txt"
STATE = "trainer.json"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


@contextmanager
def new_checkpoint(checkpoints: Path, step: int, state: dict[str, Any]) -> Iterator[Path]:
    """A folder to save roles into; it becomes the latest checkpoint when the block ends without an error."""
    temporary = checkpoints / f".global_step_{step}.tmp"
    final = checkpoints / f"global_step_{step}"
    for abandoned in checkpoints.glob(".global_step_*.tmp"):
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    (temporary / STATE).write_text(json.dumps(state, indent=2))
    _sync_tree(temporary)
    replaced = _replaced(final)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _sync(checkpoints)
    write_atomically(checkpoints / LATEST, f"{step}\n")
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    pointer = checkpoints / LATEST
    if not pointer.exists():
        return None
    folder = checkpoints / f"global_step_{pointer.read_text().strip()}"
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():  # killed between the two renames of a step that was saved again
        replaced.rename(folder)
    if not (folder / STATE).exists():
        raise CheckpointError(
            f"{pointer} names {folder.name}, which is missing or incomplete. Set trainer.resume_mode=resume_path and "
            f"trainer.resume_from_path to a complete checkpoint, or trainer.resume_mode=disable to start anew."
        )
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The driver's part of a checkpoint: step, data position, KL coefficient."""
    path = folder / STATE
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: {path.name} can't be read ({error}).") from error


def rewind(checkpoints: Path, folder: Path) -> None:
    """Make `folder` the latest checkpoint of its run, and set those of the branch that is left aside."""
    step = _step_of(folder)
    for other in checkpoints.glob("global_step_*"):
        if other.suffix == "" and _step_of(other) > step:
            keep_old(other)
    write_atomically(checkpoints / LATEST, f"{step}\n")


def _step_of(folder: Path) -> int:
    return int(read_state(folder)["global_step"]) if (folder / STATE).exists() else -1
