from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.unloaded_models import config_of, hub_problems, max_positions, vocabulary_problems
from tests.tiny import make_tiny_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0}


def model(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 128, "rope_scaling": YARN}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {**YARN, "original_max_position_embeddings": 128}}, 512),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_the_longest_sequence_counts_the_scaling_of_positions(config: dict[str, Any], limit: int | None) -> None:
    assert max_positions(config) == limit


def test_a_model_of_several_parts_is_known_by_its_language_model(tmp_path: Path) -> None:
    path = model(tmp_path / "model", model_type="whole", vocab_size=1, text_config={"vocab_size": 9})
    assert config_of(path) == {"model_type": "whole", "vocab_size": 9, "text_config": {"vocab_size": 9}}
    assert config_of(str(tmp_path)) == {}


def test_a_token_without_an_embedding_is_told_with_the_key_to_set(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    size = len(tokenizer)
    models = {"a.path": model(tmp_path / "a", vocab_size=size), "b.path": model(tmp_path / "b", vocab_size=size - 1)}
    [problem] = vocabulary_problems(models, tokenizer, size - 1, "b.tokenizer_path", "a")
    assert problem.startswith(f"b.path: the model has {size - 1} embeddings (vocab_size), and the tokenizer of a has")
    assert problem.endswith("Set b.tokenizer_path to the tokenizer of this model.")


def test_a_hub_id_is_asked_for_once_and_a_folder_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = {"a.path": "nobody/nothing", "b.path": "nobody/nothing", "c.path": str(tmp_path)}
    [problem] = hub_problems(asked)
    assert problem.startswith("a.path=nobody/nothing: there is no folder")
    assert "HF_HUB_OFFLINE forbids to download it" in problem
