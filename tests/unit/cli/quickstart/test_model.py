"""The model of the quickstart: small, made on the spot, and the same for the same seed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli import quickstart
from paceline.cli.quickstart.model import build_model, build_tokenizer, pretrain
from paceline.cli.quickstart.task import (
    split_sums,
)


def test_tokenizer_is_character_level_and_its_template_fits_the_preset_lengths() -> None:
    tokenizer = build_tokenizer()
    config = quickstart.compose_config("colocated", [])
    _, validation = split_sums(seed=1)
    for item in validation:
        chat = [{"role": "user", "content": item.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert prompt == f"<|user|>{item.question}<|assistant|>"
        assert len(tokenizer.encode(prompt)) == len(item.question) + 2 <= config.data.max_prompt_length
        answer = tokenizer.encode(f"#### {item.answer}<|end|>")
        assert len(answer) == len(item.answer) + 6 <= config.data.max_response_length
        assert tokenizer.decode(answer, skip_special_tokens=True) == f"#### {item.answer}"


def test_model_has_about_a_million_parameters_and_depends_on_the_seed_alone() -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(tokenizer, seed=5)
    torch.manual_seed(1)
    again, other = build_model(tokenizer, seed=5), build_model(tokenizer, seed=6)
    assert 0.9e6 < model.num_parameters() < 1.2e6
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.state_dict().items())
    assert not all(torch.equal(weights[name], tensor) for name, tensor in other.state_dict().items())


def test_pretraining_learns_and_is_the_same_for_the_same_seed() -> None:
    tokenizer = build_tokenizer()
    training, _ = split_sums(seed=1)
    outcomes = []
    for _ in range(2):
        model = build_model(tokenizer, seed=1)
        loss = pretrain(model, tokenizer, training, seed=1, num_steps=8)
        outcomes.append((loss, model.state_dict()))
    (loss, weights), (loss_again, weights_again) = outcomes
    assert loss < 0.8 * math.log(len(tokenizer))  # that of guessing
    assert loss == loss_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def test_prepared_model_is_a_hugging_face_folder_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("paceline.cli.quickstart.model.pretrain", lambda *_, seed: calls.append(seed))
    folder = quickstart.prepare_model(tmp_path / "material" / "model", seed=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template is not None
    text = "<|user|>12+7=<|assistant|>#### 19<|end|>"
    assert len(tokenizer) == len(build_tokenizer()) == model.config.vocab_size
    assert tokenizer.encode(text) == build_tokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    quickstart.prepare_model(folder, seed=2)
    assert calls == [2]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
