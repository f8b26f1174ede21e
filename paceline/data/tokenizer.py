"""The tokenizer of a model, ready for batches of prompts."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.errors import DataError

logger = logging.getLogger(__name__)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder (`~` is expanded) or of a hub id, padding on the left.

    A tokenizer without a padding token pads with its end-of-sequence token: attention masks, not token ids, say what
    is padding.
    """
    expanded = Path(path).expanduser()
    if not expanded.exists() and str(path).startswith(("/", ".", "~")):
        raise DataError(f"There is no tokenizer at {path}: the folder does not exist. Set the model's path.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(expanded) if expanded.exists() else str(path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"There is no tokenizer at {path}: {reason} Give the folder of a model with its tokenizer, or a hub id."
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"The tokenizer at {path} has neither a padding nor an end-of-sequence token; add one.")
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("The tokenizer at %s has no padding token; padding with %r.", path, tokenizer.pad_token)
    return tokenizer
