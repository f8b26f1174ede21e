"""Files and folders that a configuration names: whether they are there, can be read or written, and are what they
should be.

Takes the key and its value, gives a sentence for each problem, which begins with the key. Models and data are not
loaded: a config.json, the head of a data file and the names in a Python file are read.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import symtable
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.config.machine_problems import of_this_machine
from paceline.config.read_value import is_local_path
from paceline.config.tables import KINDS, table_head, table_problem
from paceline.files import exists
from paceline.run_folder import (
    CHECKPOINT_PREFIX,
    CHECKPOINTS_FOLDER,
    STATE,
    can_be_resumed,
    is_pruned,
    list_checkpoints,
)
from paceline.text import meant, nearest, shorten

JsonObject = dict[str, Any]
MODEL_FILE = "config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


# --------------------------------------------------------------------------------------------------------- data


def data_files(files: str | Path | Sequence[str | Path] | None) -> list[str]:
    """The files of data.train_files or data.val_files, patterns expanded; a pattern without a match stays as it is."""
    found: list[str] = []
    for file in [files] if isinstance(files, str | Path) else files or []:
        path = Path(file).expanduser()
        found += [str(path)] if exists(path) else sorted(glob.glob(str(path), recursive=True)) or [str(file)]
    return found


@of_this_machine
def table_problems(key: str, file: str) -> Iterator[str]:
    """A file that is no whole table."""
    path = Path(file)
    if not exists(path):
        yield f"{key}: there is no file {file}. Set it to an existing file: {KINDS}."
    elif not path.is_file():
        yield f"{key}: {file} is a folder. Set it to data files, such as [{file}/train.parquet]."
    elif not os.access(path, os.R_OK):
        yield f"{key}: {file} can't be read by this user. Change its permissions or set another file."
    elif (problem := table_problem(file)) is not None:
        yield f"{key}: {file} {problem}"


def readable_head(file: str) -> tuple[int, list[str]] | None:
    """Number of rows and names of columns; None if the file has problems of its own."""
    return None if any(table_problems("", file)) else table_head(file)


# ------------------------------------------------------------------------------------------------------- models


@of_this_machine
def model_problems(key: str, path: str) -> Iterator[str]:
    """A path that is no Hugging Face model. Of a hub id only the form is looked at."""
    if any(problems := list(_folder_or_hub_id(key, path))):
        yield from problems
    elif is_local_path(path):
        folder = Path(path).expanduser()
        if not (folder / MODEL_FILE).is_file():
            yield f"{key}: {path} has no {MODEL_FILE}, so it is no Hugging Face model. Set it to a folder that has one."
        elif "model_type" not in model_config(folder):
            yield f"{key}: {path}/{MODEL_FILE} names no model_type, so it is no model. Set it to a Hugging Face model."
        else:
            yield from _weight_problems(key, folder)


@of_this_machine
def tokenizer_problems(key: str, path: str) -> Iterator[str]:
    """A path without a tokenizer."""
    if any(problems := list(_folder_or_hub_id(key, path))):
        yield from problems
    elif is_local_path(path) and not any((Path(path).expanduser() / name).exists() for name in _TOKENIZER_FILES):
        setting = key.removesuffix("path") + "tokenizer_path" if key.endswith(".path") else key
        yield (
            f"{key}: {path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Save one there, or set {setting} "
            "to a folder or hub id that has one."
        )


def model_config(folder: Path) -> JsonObject:
    """What config.json says; nothing if it can't be read as such."""
    try:
        content = json.loads((folder / MODEL_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def language_model_config(config: JsonObject) -> JsonObject:
    """What config.json says of the language model, in a model of several parts, too."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _folder_or_hub_id(key: str, path: str) -> Iterator[str]:
    if not is_local_path(path):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?", path):
            yield f"{key}={path!r} is neither a folder nor a hub id; set it to a folder or to org/name."
    elif not Path(path).expanduser().is_dir():
        yield f"{key}: there is no folder {path}. Set it to a folder of a Hugging Face model or a hub id."


def _weight_problems(key: str, folder: Path) -> Iterator[str]:
    indices = [*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]
    if not (indices or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
        yield f"{key}: {folder} has no weights (*.safetensors). Set it to a folder that `save_pretrained` wrote."
    for index in indices[:1]:
        try:
            wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield f"{key}: {index} can't be read. Download or save the model again."
            return
        missing = [name for name in wanted if not (folder / name).exists()]
        if missing:
            yield (
                f"{key}: {folder} lacks {', '.join(missing[:3])}, {len(missing)} of {len(wanted)} files of weights. "
                "Download or save the model again."
            )


# ------------------------------------------------------------------------------------------------------ rewards


@of_this_machine
def python_file_problems(key: str, path: str, name_key: str, name: str, what: str = "function") -> Iterator[str]:
    """A Python file that can't be read, is no Python, or has no such function or class; it is not run."""
    file = Path(path).expanduser()
    if not file.is_file():
        yield f"{key}: there is no file {path}. Set it to a Python file or to null."
        return
    try:
        table = symtable.symtable(file.read_text(), str(file), "exec")
    except OSError as error:
        yield f"{key}: {path} can't be read ({error.strerror}). Change its permissions or set another file."
        return
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield f"{key}: {path} is not Python{line}: {error.args[0] if error.args else error}. Correct it."
        return
    bound = [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    # A name may also come from `import *` or a module's __getattr__: those are left for the import.
    if name not in bound and "__getattr__" not in bound and "import *" not in file.read_text():
        hint = meant(nearest(name, bound))
        public = ", ".join(item for item in bound if not item.startswith("_")) or "none"
        yield f"{name_key}={name}: {path} has no such {what}{hint} Set it to one of: {public}."


# ------------------------------------------------------------------------------------------ what a run writes


@of_this_machine
def writable_problems(key: str, folder: str) -> Iterator[str]:
    """A folder, existing or to be made, that this user can't write into."""
    path = Path(folder).expanduser()
    if exists(path) and path.is_file():
        yield f"{key}: {folder} is a file. Set it to a folder."
        return
    there = next((parent for parent in (path, *path.parents) if exists(parent)), Path("/"))
    if not there.is_dir():
        yield f"{key}: {folder} can't be made, because {there} is a file. Set it to another folder."
    elif not os.access(there, os.W_OK):
        yield f"{key}: {there} can't be written by this user. Change its permissions or set another folder."
    elif (reason := _why_not_made(path, there)) is not None:
        yield f"{key}: {shorten(folder, 200)} can't be made: {reason}. Set it to another folder."


def _why_not_made(path: Path, there: Path) -> str | None:
    """What the system says to the folder and a file in it; what was made for this is removed again."""
    made: list[Path] = []
    try:
        for folder in [*reversed([parent for parent in path.parents if there in parent.parents]), path]:
            if folder != there:
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=path):
            return None
    except FileExistsError:  # another process made it a moment ago
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@of_this_machine
def checkpoint_problems(key: str, folder: str) -> Iterator[str]:
    """A folder that is no checkpoint. What is in its files is compared when it is loaded."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        yield f"{key}: there is no folder {folder}. Set it to a checkpoint."
    elif is_pruned(path):
        yield f"{key}: {folder} was pruned and can't be resumed from. Set it to a checkpoint that has a {STATE}."
    elif not can_be_resumed(path):
        inside = _resumable(path) or _resumable(path / CHECKPOINTS_FOLDER)
        hint = f"such as {inside[-1]}" if inside else f"a folder named {CHECKPOINT_PREFIX}N"
        yield f"{key}: {folder} is no checkpoint: it has no {STATE}. Set it to one, {hint}."


def _resumable(checkpoints: Path) -> list[Path]:
    return [folder for folder in list_checkpoints(checkpoints).values() if can_be_resumed(folder)]
