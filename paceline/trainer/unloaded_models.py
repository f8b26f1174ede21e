"""What is known of a model before it is loaded: whether the hub has it, its positions, its vocabulary."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from paceline.config.path_checks import JsonObject, language_model_config, model_config
from paceline.config.read_value import is_local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_SECONDS = 5.0
"""How long the hub may take to answer."""
_SCALED = ("linear", "dynamic", "yarn")
"""Kinds of rotary scaling whose factor is not in max_position_embeddings."""


def hub_problems(asked: Mapping[str, str]) -> Iterator[str]:
    """Of these keys and paths those that are no folder here and that the hub does not have, or can't be asked for."""
    seen: set[str] = set()
    for key, path in asked.items():
        if not is_local_path(path) and path not in seen:
            seen.add(path)
            if (reason := hub_problem(path)) is not None:
                yield (
                    f"{key}={path}: there is no folder {Path(path).absolute()}, and as a hub id it can't be used: "
                    f"{reason}. Set it to a folder of a Hugging Face model, or to a hub id that can be reached."
                )


def hub_problem(repository: str) -> str | None:
    """Why a model of the hub can't be loaded; None if it is in the local cache, or the hub has it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        cached = [try_to_load_from_cache(repository, name) for name in ("config.json", "tokenizer_config.json")]
    except HFValidationError as error:
        return str(error).rstrip(".")
    if any(isinstance(file, str) for file in cached):
        return None
    if constants.HF_HUB_OFFLINE:
        return "it is not in the local cache, and HF_HUB_OFFLINE forbids to download it"
    address = urlparse(constants.ENDPOINT)
    if not any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        try:
            socket.create_connection((str(address.hostname), address.port or 443), HUB_SECONDS).close()
        except OSError as error:
            return f"it is not in the local cache, and {address.hostname} can't be reached ({error})"
    try:
        get_hf_file_metadata(hf_hub_url(repository, "config.json"), timeout=HUB_SECONDS)
    except GatedRepoError:
        return "its owner must grant access: ask there, and set HF_TOKEN"
    except RepositoryNotFoundError:
        return f"{address.hostname} has no such model, or it is private and HF_TOKEN is not set"
    except (HfHubHTTPError, OSError, ValueError):
        return None  # loading it says more
    return None


def whole_config(path: str) -> JsonObject:
    """config.json of a model; nothing if it can't be read here."""
    if is_local_path(path):
        return model_config(Path(path).expanduser())
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    try:
        return dict(json.loads(Path(cached).read_text())) if isinstance(cached, str) else {}
    except (OSError, ValueError):
        return {}


def config_of(path: str) -> JsonObject:
    """What config.json of a model says of its language model."""
    return language_model_config(whole_config(path))


def max_positions(config: JsonObject) -> int | None:
    """The longest sequence that a model has positions for; None if it has no such limit.

    >>> max_positions({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    16384
    """
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in _SCALED:
        before, factor = scaling.get("original_max_position_embeddings") or limit, scaling.get("factor") or 1
        if isinstance(before, int) and isinstance(factor, int | float):
            return max(limit, int(before * factor))
    return limit


def vocabulary_problems(
    models: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, largest: int, setting: str, where: str
) -> Iterator[str]:
    """A token that a model has no embedding for. Tokens that were added for other uses, such as images, may be.

    `models` are paths by their keys; the tokenizer is that of `where`, which the key `setting` changes.
    """
    added = set(tokenizer.get_added_vocab().values())
    own = max((number for number in tokenizer.get_vocab().values() if number not in added), default=-1)
    special = [number for number in (tokenizer.pad_token_id, tokenizer.eos_token_id) if number is not None]
    needed = max([own, largest, *special])
    for key, path in models.items():
        size = config_of(path).get("vocab_size")
        if isinstance(size, int) and needed >= size:
            yield (
                f"{key}: the model has {size} embeddings (vocab_size), and the tokenizer of {where} has the token "
                f"{needed}. Set {setting} to the tokenizer of this model."
            )
