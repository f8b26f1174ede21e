"""A tokenizer as the rollout needs it: padding on the left, and a token to pad with."""

from __future__ import annotations

import pytest

from paceline.data import load_tokenizer
from paceline.errors import DataError
from tests.tiny import make_tiny_tokenizer


def test_tokenizer_pads_left_and_falls_back_to_the_end_token(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.padding_side == "left"
    assert loaded.pad_token_id == loaded.eos_token_id == 1


def test_missing_tokenizer_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
