"""The images of prompts as columns of a batch: patches of pixels, and how many of them make which image.

`pixel_values` is (batch, patches, numbers of a patch), `image_grid_thw` (batch, images, 3): frames, rows and columns of
patches of each image. Both are filled up with zeros to the most that a prompt of the run's files has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.schema import IMAGE_COLUMNS

PIXELS, GRIDS = IMAGE_COLUMNS


class ImageInputs(NamedTuple):
    """Images as transformers' models take them."""

    pixel_values: Tensor
    """(patches, numbers of a patch) of all images, one behind the other."""
    grids: Tensor
    """(images, 3)"""

    @classmethod
    def joined(cls, images: list[ImageInputs]) -> ImageInputs:
        return cls(torch.cat([one.pixel_values for one in images]), torch.cat([one.grids for one in images]))


def image_inputs(pixel_values: Tensor, grids: Tensor) -> ImageInputs:
    """The images of several rows, without what the columns are filled up with."""
    patches = torch.arange(pixel_values.shape[1], device=grids.device)
    is_patch = patches < grids.prod(dim=-1).sum(dim=-1, keepdim=True)
    return ImageInputs(pixel_values[is_patch], grids[grids.prod(dim=-1) > 0])
