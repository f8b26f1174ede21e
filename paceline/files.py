"""Files that are written whole or not at all, and put aside instead of overwritten, whatever is in them."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from paceline.errors import StorageError

logger = logging.getLogger(__name__)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_DISK = (
    *_FULL, *_REFUSED, errno.EFBIG, errno.EIO, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ESTALE,
)  # fmt: skip
_GO_ON = "Then start again: the run goes on from its last complete checkpoint, which is as it was."
_REMOVED = "The folder was removed while the run wrote to it, with the checkpoints in it. Start again in a new one."


def exists(path: str | Path) -> bool:
    """False also for what can't be a name: too long, in a loop of links, or with characters that names can't have."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def storage_error(folder: Path, error: Exception) -> StorageError:
    """What to say when something in `folder` could not be written."""
    number = error.errno if isinstance(error, OSError) else None
    where = getattr(error, "filename", None) or folder
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    is_gone = number == errno.ENOENT or (there != folder and os.strerror(errno.ENOENT) in str(error))
    free = shutil.disk_usage(there).free / 2**20
    # torch and safetensors don't pass the system's number on; what is left of the disk shows it.
    if number in _FULL or (number is None and free < 1):
        advice = f"Its disk is full, {free:.1f} MiB are free: make room. {_GO_ON}"
    elif is_gone:
        advice = _REMOVED
    elif number in _REFUSED:
        advice = f"The folder is read-only for this user: change that, or set trainer.default_local_dir. {_GO_ON}"
    else:
        advice = f"Its disk has {free:.0f} MiB free. {_GO_ON}"
    return StorageError(f"{where} can't be written: {error}. {advice}")


@contextmanager
def readable_storage_errors(folder: Path) -> Iterator[None]:
    """Raise what the disk refuses inside the block as a StorageError."""
    try:
        yield
    except OSError as error:
        # Where a file in it is gone, so may the folder be: writers in other processes make an empty one again.
        is_inside = Path(str(error.filename)).is_relative_to(folder)
        was_removed = error.errno == errno.ENOENT and (is_inside or not folder.exists())
        if error.errno not in _DISK and not was_removed:
            raise
        raise storage_error(folder, error) from error


def append_whole(file: IO[bytes], content: bytes) -> None:
    """Write at the end of an unbuffered file, or leave it as it was: a full disk takes a part and says nothing.

    Nor does the system say that the file has no name any more, because someone removed it.
    """
    if os.fstat(file.fileno()).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.name)
    end = file.seek(0, os.SEEK_END)
    try:
        written = file.write(content)
        if written != len(content):
            file.write(content[written:])  # raises
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        file.truncate(end)
        raise


def keep_old(path: Path) -> None:
    """Rename what an earlier run left at `path` to the first free numbered name: metrics.jsonl to metrics.1.jsonl."""
    if not path.exists():
        return
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    kept = next(candidate for candidate in numbered if not candidate.exists())
    path.rename(kept)
    logger.info("%s is of an earlier run; kept as %s", path, kept.name)


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file so that a reader sees the old content or the new, never a part."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, *, durable: bool = True, many_writers: bool = False) -> Iterator[Path]:
    """A name beside `path` to write a file to, which takes the place of `path` when the block ends without an error.

    A `durable` file is on the disk by then; others are whole as long as the machine stays up. With `many_writers` each
    has a name of its own. A single writer always takes the same: if it is killed, its next write removes what is left.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp" if many_writers else f".{path.name}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """The same for a folder: an empty one with a hidden name, which takes the place of `path` when the block ends."""
    temporary, old = (path.with_name(f".{path.name}.{ending}") for ending in ("tmp", "old"))
    for left_over in (temporary, old):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        sync(path.parent)
    finally:
        for left_over in (temporary, old):
            shutil.rmtree(left_over, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """The same for a folder and all that is in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))
