"""Checkpoints of a run: complete or absent, never half.

`paceline.run_folder` has their layout. A checkpoint is written under a temporary name and renamed when all of it is on
disk; the pointer moves last. A run that is killed at any instant finds the one before. The manifest holds size and
sha256 of every file, so that a file which was lost or changed later is noticed before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from paceline.errors import CheckpointError
from paceline.files import keep_old, sync, sync_tree, write_atomically
from paceline.run_folder import (
    ACTOR,
    CHECKPOINT_PREFIX,
    CRITIC,
    LATEST,
    MANIFEST,
    PRUNED_STATE,
    STATE,
    can_be_resumed,
    checkpoint_name,
    is_pruned,
    list_checkpoints,
)

if TYPE_CHECKING:
    from paceline.data.changes import FileRecord
    from paceline.trainer.ppo.rollouts_ahead import SavedRollout

logger = logging.getLogger(__name__)

_ANY = f"{CHECKPOINT_PREFIX}*"
_START_OVER = (
    "Set trainer.resume_mode=resume_path and trainer.resume_from_path to a complete checkpoint, or "
    "trainer.resume_mode=disable to start over."
)


class SavedState(TypedDict):
    """The driver's part of a checkpoint, in trainer.json."""

    global_step: int
    dataloader: NotRequired[dict[str, int]]
    """Its position in the data."""
    data_files: NotRequired[dict[str, list[FileRecord]]]
    """The files that the run began with, by key."""
    kl_ctrl: NotRequired[dict[str, float]]
    version: NotRequired[int]
    """Of the policy; earlier versions of paceline did not save it."""
    rollouts: NotRequired[list[SavedRollout]]
    """Steps that were sampled ahead."""


class _FileEntry(TypedDict):
    """What the manifest says of a file."""

    size: int
    sha256: str


# ------------------------------------------------------------------------------------------------------- saving


def begin_checkpoint(checkpoints: Path, step: int) -> Path:
    """An empty folder to save roles into, under a temporary name. One at a time: it removes what others abandoned."""
    _remove_abandoned(checkpoints, f".{_ANY}.tmp")
    temporary = _unfinished(checkpoints, step)
    temporary.mkdir(parents=True)
    return temporary


def abandon_checkpoint(checkpoints: Path, step: int) -> None:
    """Give the disk back what a checkpoint that can't be completed has taken."""
    shutil.rmtree(_unfinished(checkpoints, step), ignore_errors=True)


def _unfinished(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".{checkpoint_name(step)}.tmp"


def complete_checkpoint(temporary: Path, state: SavedState) -> Path:
    """Make the folder that `begin_checkpoint` gave, with all roles in it, the latest checkpoint; gives its name."""
    checkpoints = temporary.parent
    final = checkpoints / temporary.name.removeprefix(".").removesuffix(".tmp")
    (temporary / STATE).write_text(json.dumps(state, indent=2))
    (temporary / MANIFEST).write_text(json.dumps({"files": _describe_files(temporary)}, indent=2))
    sync_tree(temporary)
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    sync(checkpoints)
    _point_to(checkpoints, int(final.name.removeprefix(CHECKPOINT_PREFIX)))
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _remove_abandoned(checkpoints: Path, pattern: str) -> None:
    """What a killed run was about to write or to delete."""
    for folder in checkpoints.glob(pattern):
        shutil.rmtree(folder, ignore_errors=True)


def _point_to(checkpoints: Path, step: int) -> None:
    write_atomically(checkpoints / LATEST, f"{step}\n".encode())


# ------------------------------------------------------------------------------------------------- verification


def verify_checkpoint(folder: Path, *, hashes: bool = True, part: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, a sentence for each file; nothing if it is as it was written.

    `part` looks at one role alone, such as actor: that is whole also where another role's was pruned. Without
    `hashes` a file of the right size counts as unchanged: quick for any size. With them every byte is read, about a
    second per GB and core.
    """
    if part is None and is_pruned(folder):
        return [f"{folder.name} was pruned and can't be resumed from: actor or critic are gone"]
    try:
        wanted: dict[str, _FileEntry] = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return [f"{folder.name} has no {MANIFEST}"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder.name}/{MANIFEST} can't be read ({error!r})"]
    if part is not None:
        wanted = {name: file for name, file in wanted.items() if name.startswith(f"{part}/")}
        if not wanted or not (folder / part).is_dir():
            return [f"{folder.name} has no {part}"]
    problems = []
    for name, file in wanted.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{folder.name}/{name} is missing")
        elif path.stat().st_size != file["size"]:
            problems.append(f"{folder.name}/{name} has {path.stat().st_size} bytes instead of {file['size']}")
    if hashes and not problems:
        digests = _digests([folder / name for name in wanted])
        problems = [
            f"{folder.name}/{name} was changed: its sha256 is not the one it was written with"
            for (name, file), digest in zip(wanted.items(), digests, strict=True)
            if digest != file["sha256"]
        ]
    return problems


def require_intact(folder: Path) -> None:
    """Raise a CheckpointError that names what is wrong with a checkpoint; one without a manifest is an older one."""
    problems = _problems(folder, hashes=True)
    if problems:
        raise CheckpointError(f"{folder} can't be resumed from: {'; '.join(problems)}. {_START_OVER}")


def _problems(folder: Path, *, hashes: bool) -> list[str]:
    """As `verify_checkpoint`, but a checkpoint of a version that wrote no manifest is whole if it has its state."""
    if can_be_resumed(folder) and not (folder / MANIFEST).exists():
        try:
            read_state(folder)
        except CheckpointError as error:
            return [str(error)]
        return []
    return verify_checkpoint(folder, hashes=hashes)


def _describe_files(folder: Path) -> dict[str, _FileEntry]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _digests(paths), strict=True)
    }


def _digests(paths: list[Path]) -> list[str]:
    """sha256 of each file, several at a time: hashing leaves the interpreter's lock to others."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as threads:
        return list(threads.map(digest, paths))


# ------------------------------------------------------------------------------------------------------- finding


def latest_checkpoint(checkpoints: Path, *, repair: bool = True) -> Path | None:
    """The newest complete checkpoint of a run, or None if it never saved one.

    Damaged ones are skipped with a warning; if there are no others, that is a CheckpointError. Without `repair`
    nothing is renamed or deleted: the run may be going on.
    """
    if repair:
        _finish_interrupted_replacements(checkpoints)
    damage: list[str] = []
    for folder in _newest_first(checkpoints):
        if is_pruned(folder):
            continue
        problems = _problems(folder, hashes=True)
        if not problems:
            if not (folder / MANIFEST).exists():
                logger.warning("%s has no %s, so its files can't be verified", folder, MANIFEST)
            return folder
        logger.warning("%s is damaged and skipped: %s", folder, "; ".join(problems))
        damage += problems
    pointer = checkpoints / LATEST
    if pointer.exists() and not damage:
        damage = [f"{LATEST} names step {pointer.read_text().strip()}, which is not there"]
    if damage:
        raise CheckpointError(f"{checkpoints} has no complete checkpoint: {'; '.join(damage)}. {_START_OVER}")
    return None


def find_part(checkpoints: Path, part: str, step: int | None = None) -> Path:
    """A role's folder in the checkpoint of `step`, or in the newest where it is whole. Changes nothing on the disk."""
    by_step = _by_step(checkpoints)
    if not by_step:
        raise CheckpointError(f"{checkpoints} has no checkpoint. Set trainer.save_freq for the run.")
    if step is None:
        return first_whole_part(_newest_first(checkpoints), part)
    if step not in by_step:
        steps = ", ".join(map(str, by_step))
        raise CheckpointError(f"{checkpoints} has no checkpoint of step {step}; there are those of {steps}.")
    return first_whole_part([by_step[step]], part)


def first_whole_part(folders: Sequence[Path], part: str) -> Path:
    """A role's folder in the first of these checkpoints where it is as it was written; every byte of it is read."""
    damage: list[str] = []
    for folder in folders:
        problems = verify_checkpoint(folder, part=part)
        if not problems:
            if damage:
                logger.warning("skipped, since damaged: %s; taking %s", "; ".join(damage), folder / part)
            return folder / part
        damage += problems
    where = folders[0] if len(folders) == 1 else folders[0].parent
    raise CheckpointError(f"{where} has no whole {part} to read: {'; '.join(damage)}.")


def _newest_first(checkpoints: Path) -> list[Path]:
    return list(reversed(_by_step(checkpoints).values()))


def _by_step(checkpoints: Path) -> dict[int, Path]:
    try:
        return list_checkpoints(checkpoints)
    except OSError as error:  # such as a loop of links
        raise CheckpointError(f"{checkpoints} can't be read: {error}. {_START_OVER}") from error


def _finish_interrupted_replacements(checkpoints: Path) -> None:
    """A step that was saved again is for a moment only there under its old content's hidden name."""
    for replaced in checkpoints.glob(f".{_ANY}.old"):
        folder = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old"))
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(folder)


def read_state(folder: Path) -> SavedState:
    """The driver's part of a checkpoint: step, data position, KL coefficient."""
    path = folder / STATE
    try:
        state: SavedState = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {path.name} can't be read ({error}).") from error
    if not isinstance(state, dict) or type(state.get("global_step")) is not int:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {path.name} has no global_step.")
    return state


def rewind(checkpoints: Path, folder: Path) -> None:
    """Make `folder` the latest checkpoint of its run, and set those of the branch that is left aside."""
    step = read_state(folder)["global_step"]
    for other_step, other in reversed(_by_step(checkpoints).items()):
        if other_step >= step and os.path.realpath(other) != os.path.realpath(folder):
            keep_old(other)
    _point_to(checkpoints, step)


# ------------------------------------------------------------------------------------------------------- pruning


def prune_checkpoints(checkpoints: Path, keep_actor: int | None, keep_critic: int | None) -> None:
    """Delete the actor's (critic's) part of all but the newest so many checkpoints that have one; None keeps all.

    A checkpoint with neither left goes as a whole. The newest complete one is never touched, nor are damaged ones,
    which count for nothing. Whatever is deleted first loses the name by which it would be found, oldest first: a kill
    leaves nothing that looks complete and is not.
    """
    _remove_abandoned(checkpoints, f".{_ANY}.pruned")
    _remove_abandoned(checkpoints, f"{_ANY}/.*.pruned")
    folders = [folder for folder in _newest_first(checkpoints) if _is_pruned_or_intact(folder)]
    while folders and not can_be_resumed(folders[0]):
        folders.pop(0)
    doomed: dict[Path, list[str]] = {folder: [] for folder in reversed(folders)}
    for part, keep in ((ACTOR, keep_actor), (CRITIC, keep_critic)):
        holders = [folder for folder in folders if (folder / part).is_dir()]
        for folder in [] if keep is None else holders[max(keep, 1) :]:
            doomed[folder].append(part)
    for folder, parts in doomed.items():
        if folder == folders[0] or not parts:
            continue
        if all(part in parts for part in (ACTOR, CRITIC) if (folder / part).is_dir()):
            _delete(folder)
            continue
        if can_be_resumed(folder):
            (folder / STATE).rename(folder / PRUNED_STATE)
            sync(folder)
        for part in parts:
            _delete(folder / part)


def _is_pruned_or_intact(folder: Path) -> bool:
    return is_pruned(folder) or not _problems(folder, hashes=False)


def _delete(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.pruned")
    folder.rename(hidden)
    sync(folder.parent)
    shutil.rmtree(hidden)
    logger.info("deleted %s: trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep", folder)
