"""The images of prompts: where they stand in a chat, how many tokens they take, and their pixels.

In a chat each `<image>` stands for the next image of the row. The model's chat template writes one token for it, which
becomes as many as the model reads for an image of its size. Pixels are read when a row is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from transformers import AutoConfig, AutoImageProcessor

from paceline.errors import ConfigError, DataError
from paceline.protocol.image_columns import ImageInputs

MARK = "<image>"


class PromptImages:
    """Reads images as the model at `path` wants them."""

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the image processor of {path} can't be read: {error} Set actor_rollout_ref.model.path to a model of "
                "images with its preprocessor_config.json, or leave data.image_key out."
            ) from error
        self.token_id = int(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).image_token_id)
        """Of the token that is repeated for an image."""

    def with_parts(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat whose texts are lists of parts, as templates of such models want them.

        >>> PromptImages.with_parts(None, [{"role": "user", "content": "<image>What is it?"}])
        [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}]
        """
        return [{**message, "content": _parts(message["content"])} for message in chat]

    def num_patches(self, cells: Sequence[object]) -> list[int]:
        """Patches of each image; only the heads of the images are read."""
        sizes = [_opened(cell).size for cell in cells]
        return [self._processor.get_number_of_image_patches(height, width, {}) for width, height in sizes]

    def expanded(self, ids: Sequence[int], patches: Sequence[int]) -> list[int]:
        """Token ids with the token of each image as often as the model reads it. DataError: another number of them."""
        places = [place for place, token in enumerate(ids) if token == self.token_id]
        if len(places) != len(patches):
            raise DataError(f"has {len(patches)} images and {len(places)} places for them; write {MARK} for each")
        merged = int(self._processor.merge_size) ** 2
        counts = iter(patches)
        return [one for token in ids for one in [token] * (next(counts) // merged if token == self.token_id else 1)]

    def save(self, folder: Path) -> None:
        """Write preprocessor_config.json, which a model's folder needs to read images."""
        self._processor.save_pretrained(folder)

    def read(self, cells: Sequence[object]) -> ImageInputs:
        """The pixels of a row's images."""
        images = [_opened(cell).convert("RGB") for cell in cells]
        read = self._processor(images=images, return_tensors="pt")
        return ImageInputs(read["pixel_values"].float(), read["image_grid_thw"].long())

    def padded(self, cells: Sequence[object], num_patches: int, num_images: int) -> ImageInputs:
        """The same as the columns of a row."""
        pixels, grids = self.read(cells)
        wide = torch.zeros(num_patches, pixels.shape[-1])
        wide[: len(pixels)] = pixels
        all_grids = torch.zeros(num_images, 3, dtype=torch.int64)
        all_grids[: len(grids)] = grids
        return ImageInputs(wide, all_grids)


def _parts(content: object) -> object:
    if not isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _opened(cell: object) -> Image.Image:
    """An image of a file's cell: {bytes, path} as datasets write it, bytes, or a path."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    try:
        if isinstance(cell, bytes):
            return Image.open(io.BytesIO(cell))
        if isinstance(cell, str):
            return Image.open(Path(cell).expanduser())
        if isinstance(cell, np.ndarray):
            return Image.fromarray(cell)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"has an image that can't be read: {error}") from error
    raise DataError(f"has {type(cell).__name__} for an image; write {{bytes, path}}, bytes or a path")
