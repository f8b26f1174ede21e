"""Images of prompts: where they stand, how many tokens they take, what of them is read, and what is wrong with rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline.config import DataConfig
from paceline.data import RLHFDataset, collate_fn, load_tokenizer
from paceline.data.prompt_images import PromptImages
from paceline.errors import ConfigError, DataError
from paceline.protocol.image_columns import image_inputs
from tests.tiny import make_tiny_model
from tests.tiny_vl import COLOURS, SIDE, VISION_TOKENS, draw, make_tiny_vl_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vl_model(tmp_path_factory.mktemp("vl"))


def dataset(model: Path, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> RLHFDataset:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"data_source": "a", **row} for row in rows]), file)
    config = DataConfig(**{"max_prompt_length": 40, "image_key": "images", "cache_dir": "", **settings})
    return RLHFDataset(file, load_tokenizer(str(model)), config, images=PromptImages(str(model)))


def row(content: str, *images: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "images": list(images)}


def test_an_image_takes_as_many_tokens_as_its_size_wants(model: Path, tmp_path: Path) -> None:
    rows = [row("<image>a<image>?", draw("r"), draw("g", width=3 * SIDE)), row("b<image>", draw("b"))]
    data = dataset(model, tmp_path, rows)
    start, end, image = load_tokenizer(str(model)).convert_tokens_to_ids(VISION_TOKENS)
    batch = collate_fn([data[0], data[1]])
    assert [ids.tolist().count(image) for ids in batch["input_ids"]] == [1 + 3, 1]
    assert [token for token in data[0]["input_ids"].tolist() if token in (start, end, image)] == [
        *(start, image, end),
        *(start, image, image, image, end),
    ]
    assert batch["image_grid_thw"].tolist() == [[[1, 2, 2], [1, 2, 6]], [[1, 2, 2], [0, 0, 0]]]
    assert batch["pixel_values"].shape[:2] == (2, 16)
    assert "images" not in batch


def test_what_columns_are_filled_up_with_is_left_out_again(model: Path, tmp_path: Path) -> None:
    rows = [row("<image>", draw("b")), row("<image><image>", draw("r"), draw("g", width=2 * SIDE))]
    data = dataset(model, tmp_path, rows)
    batch = collate_fn([data[0], data[1]])
    found = image_inputs(batch["pixel_values"], batch["image_grid_thw"])
    whole = [PromptImages(str(model)).read(one["images"]) for one in rows]
    assert torch.equal(found.pixel_values, torch.cat([one.pixel_values for one in whole]))
    assert torch.equal(found.grids, torch.cat([one.grids for one in whole]))


def test_a_cell_may_be_a_path_or_bytes(model: Path, tmp_path: Path) -> None:
    images = PromptImages(str(model))
    cell = draw("g")
    (tmp_path / "g.png").write_bytes(cell["bytes"])
    forms = [cell, cell["bytes"], str(tmp_path / "g.png"), {"bytes": None, "path": str(tmp_path / "g.png")}]
    pixels = [images.read([form]).pixel_values for form in forms]
    assert all(torch.equal(one, pixels[0]) for one in pixels)
    assert not torch.equal(pixels[0], images.read([draw("r")]).pixel_values)
    assert len(COLOURS) == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("<image>", draw("r")), row("<image>?")], "row 1 of .* has no image, and all prompts must have one"),
        ([row("?", draw("r"))], "row 0 of .* has 1 images and 0 places for them; write <image> for each"),
        ([row("<image><image>", draw("r"))], "has 1 images and 2 places"),
        ([row("<image>", {"bytes": b"no image", "path": None})], "has an image that can't be read"),
        ([row("<image>", {"bytes": None, "path": "/nothing/here.png"})], "has an image that can't be read"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(model: Path, tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        dataset(model, tmp_path, rows)


def test_a_file_without_the_column_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'pictures' of images; it has data_source, images, prompt"):
        dataset(model, tmp_path, [row("<image>", draw("r"))], image_key="pictures")


def test_the_tokens_of_images_count_for_the_length_of_a_prompt(model: Path, tmp_path: Path) -> None:
    rows = [row("<image>", draw("r")), row("<image><image>", *[draw("r", 2 * SIDE, 2 * SIDE)] * 2)]
    with pytest.raises(DataError, match=r"1 of 2 prompts are longer than data.max_prompt_length=8"):
        dataset(model, tmp_path, rows, max_prompt_length=8)
    assert len(dataset(model, tmp_path, rows, max_prompt_length=8, filter_overlong_prompts=True)) == 1


def test_a_model_of_text_reads_no_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the image processor of .* can't be read"):
        PromptImages(str(make_tiny_model(tmp_path)))
