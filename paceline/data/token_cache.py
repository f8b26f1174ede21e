"""Token ids on disk, by the content of the prompts and the tokenizer that they were made from.

A file is written only after all prompts have passed their checks, so prompts that are found here need no other check.
What a file says depends on its name alone: processes that write it at the same time write the same, and each reader
sees a whole file. Nothing here stops a run: what can't be read is computed again, what can't be written is a warning.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from paceline.files import replacing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Part of every key. Raise it when the way from a prompt to its tokens, the checks or the files change."""
_CHUNK = 1000


def cache_folder(setting: str | None) -> Path | None:
    """Where `data.cache_dir` puts token ids; None if it turns the cache off."""
    if setting == "":
        return None
    folder = setting or os.environ.get("PACELINE_CACHE") or "~/.cache/paceline"
    return Path(os.path.expanduser(folder)) / "tokens"


def cache_key(
    columns: Iterable[pa.ChunkedArray],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, object] | None = None,
) -> str | None:
    """A hash of prompts, tokenizer and arguments of the chat template; None for a tokenizer that has no identity.

    How the prompts are spread over row groups makes no difference.
    """
    identity = _identity(tokenizer)
    if identity is None:
        return None
    sink = _HashSink()
    sink.write(json.dumps(identity, sort_keys=True, default=str).encode())
    if template_kwargs:
        sink.write(json.dumps(dict(template_kwargs), sort_keys=True, default=str).encode())
    for column in columns:
        schema = pa.schema([("prompt", column.type)])
        with pa.ipc.new_stream(sink, schema) as stream:
            for start in range(0, len(column), _CHUNK):
                stream.write_batch(pa.record_batch([column.slice(start, _CHUNK).combine_chunks()], schema=schema))
    return sink.hash.hexdigest()


def load_tokens(folder: Path, key: str, num_prompts: int) -> list[np.ndarray] | None:
    """The token ids of each prompt; None if they are not there or the file is not what was written."""
    file = folder / f"{key}.npz"
    try:
        with np.load(file, allow_pickle=False) as content:  # the zip format has a checksum for each array
            tokens, lengths = content["tokens"], content["lengths"]
            if content["key"] != key or tokens.dtype != np.int32 or len(lengths) != num_prompts:
                raise ValueError("its content belongs to other prompts")
        if tokens.ndim != 1 or lengths.min() < 1 or lengths.sum() != len(tokens):
            raise ValueError("its lengths do not fit its tokens")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged file can raise anything
        logger.warning("the cached tokens in %s can't be used and are made again: %s", file, error)
        return None
    return np.split(tokens, np.cumsum(lengths)[:-1])


def save_tokens(folder: Path, key: str, tokens: list[np.ndarray]) -> bool:
    """Keep the token ids for the next run; False, with a warning, if that is not possible."""
    lengths = np.array([len(ids) for ids in tokens])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{key}.npz"
        with replacing(file, durable=False, many_writers=True) as temporary, temporary.open("xb") as stream:
            np.savez(stream, key=np.array(key), tokens=np.concatenate(tokens), lengths=lengths)
    except OSError as error:
        logger.warning(
            "the tokens can't be kept for the next run: %s. Set data.cache_dir to a folder that can be written, or to "
            "'' for no cache.",
            error,
        )
        return False
    return True


class _HashSink(io.RawIOBase):
    """A file that keeps a hash of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.blake2b(digest_size=20)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes


def _identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, object] | None:
    """All that decides which tokens a prompt gets."""
    kind = type(tokenizer)
    if not tokenizer.is_fast or not kind.__module__.startswith("transformers."):
        return None  # Python code, which may change and keep its name
    try:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # the tokenizers library raises this very class for parts that are written in Python
        return None
    for left_by_the_last_call in ("padding", "truncation"):
        backend.pop(left_by_the_last_call, None)
    template = tokenizer.chat_template
    return {
        "format": _FORMAT,
        "versions": [transformers.__version__, tokenizers.__version__],
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "backend": backend,
        "chat_template": template,
        "special_tokens": tokenizer.special_tokens_map,
        "split_special_tokens": tokenizer.split_special_tokens,
        # Some templates write today's date into the prompt.
        "date": datetime.date.today().isoformat() if "strftime_now" in str(template) else None,
    }
