from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.config import ModelConfig
from paceline.engine.hf_models import build_empty_model, build_model
from paceline.errors import ConfigError
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


def config(path: Path | str, **fields: bool) -> ModelConfig:
    return ModelConfig(path=str(path), **fields)


def test_a_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert build_model(config(f"~/{folder.name}"), "causal_lm", train=False).config.hidden_size == 16


def test_positions_may_be_more_than_the_folder_says(folder: Path, tmp_path: Path) -> None:
    longer = ModelConfig(path=str(folder), max_position_embeddings=4096)
    assert build_model(longer, "causal_lm", train=False).config.max_position_embeddings == 4096
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.max_position_embeddings=9: .* \(gpt2\) has no rotary embeddings"):
        build_model(ModelConfig(path=str(tmp_path), max_position_embeddings=9), "causal_lm", train=False)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/nothing: there is no such folder"):
        build_model(config(tmp_path / "nothing"), "causal_lm", train=False)


def test_a_folder_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"without config.json \(found: notes.txt\)"):
        build_model(config(tmp_path), "causal_lm", train=False)


def test_a_folder_without_weights_is_a_configuration_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="could not be read as a Hugging Face model"):
        build_model(config(tmp_path), "causal_lm", train=False)


def test_a_path_that_is_not_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"model.path is not set"):
        build_model(ModelConfig(), "causal_lm", train=False)


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_weights_that_lack_a_layer_are_an_error(folder: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack .*model.layers.0.mlp.up_proj.weight"):
        build_model(config(tmp_path), kind, train=True)


def test_a_new_value_head_depends_on_the_seed_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    heads = []
    with caplog.at_level(logging.INFO, logger="paceline"):
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            heads.append(build_model(config(folder), "value", train=True).score.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert "score.weight" in caplog.messages[0]


def test_building_says_nothing_on_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_model(config(folder), "value", train=True)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_reward_model_without_a_trained_head_is_an_error_unless_it_is_to_be_trained(folder: Path) -> None:
    with pytest.raises(ConfigError, match="would be random"):
        build_model(config(folder), "sequence_classification", train=False)
    build_model(config(folder), "sequence_classification", train=True)


@pytest.mark.parametrize("kind", ["causal_lm", "value", "sequence_classification"])
def test_there_is_no_dropout_anywhere(tmp_path: Path, kind: str) -> None:
    gpt2 = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.1, attn_pdrop=0.2, embd_pdrop=0.3
    )
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path)
    model = build_model(config(tmp_path), kind, train=True).train()
    assert not any(module.p for module in model.modules() if isinstance(module, nn.Dropout))
    inputs = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_all_weights_are_float32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w.bfloat16() for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    model = build_model(config(folder), "causal_lm", train=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_model_for_inference_has_nothing_to_train(folder: Path) -> None:
    assert not any(p.requires_grad for p in build_model(config(folder), "causal_lm", train=False).parameters())


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
def test_an_empty_model_has_the_same_parameters_and_ties(folder: Path, kind: str) -> None:
    full = build_model(config(folder), kind, train=True)
    random_state = torch.get_rng_state()
    empty = build_empty_model(config(folder), kind, train=True)
    assert torch.equal(random_state, torch.get_rng_state())
    shapes = {name: parameter.shape for name, parameter in full.named_parameters()}
    assert {name: parameter.shape for name, parameter in empty.named_parameters()} == shapes
    assert list(empty.state_dict()) == list(full.state_dict())
    assert all(parameter.device.type == "cpu" for parameter in empty.parameters())
