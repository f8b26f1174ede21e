"""A tiny model of images and text, Qwen2-VL or Qwen2.5-VL, with its tokenizer and image processor; and images."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen2_5_VLConfig, Qwen2VLConfig

from tests.tiny import make_tiny_tokenizer

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
COLOURS = {"r": (230, 20, 20), "g": (20, 230, 20), "b": (20, 20, 230)}
"""A letter to the colour that it names."""
SIDE = 8
"""Of an image: 2 x 2 patches of 4 pixels, which are one token."""


def make_tiny_vl_model(folder: Path, model_type: str = "qwen2_vl", seed: int = 0) -> Path:
    """A folder with a randomly initialised model."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    tokenizer.chat_template = TEMPLATE
    start, end, image = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "initializer_range": 0.1,
    }  # fmt: skip
    ids = {"image_token_id": image, "vision_start_token_id": start, "vision_end_token_id": end, "video_token_id": 2}
    if model_type == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "in_channels": 3}
        config: Any = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16}
        vision |= {"fullatt_block_indexes": [0], "in_channels": 3}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": SIDE * SIDE, "max_pixels": 4 * SIDE * SIDE,
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def draw(colour: str, width: int = SIDE, height: int = SIDE) -> dict[str, Any]:
    """An image of one colour, as a data file has it."""
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), COLOURS[colour], np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_colours(path: Path, rows: int, seed: int = 0, sizes: tuple[int, ...] = (SIDE,), most_images: int = 1) -> Path:
    """Rows in verl's schema, whose answer is the first letter of the (first) image's colour."""
    dice = random.Random(seed)
    table = []
    for index in range(rows):
        colours = [dice.choice(sorted(COLOURS)) for _ in range(1 + index % most_images)]
        table.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image>" * len(colours) + "?"}],
                "images": [draw(colour, width=sizes[index % len(sizes)]) for colour in colours],
                "reward_model": {"style": "rule", "ground_truth": colours[0]},
                "extra_info": {"split": "train", "index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(table), path)
    return path
