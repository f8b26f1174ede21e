"""Log-probs from hidden states only where they are those of the model's own logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, PretrainedConfig
from transformers.models.qwen2 import modeling_qwen2

from paceline.config import ModelConfig, OptimConfig
from paceline.engine import Engine, EngineSpec, logprobs
from paceline.engine.backends.local_engine import LocalEngine
from tests.tiny import make_tiny_model
from tests.unit.engine.test_logprobs import LargestTensor
from tests.unit.engine.test_packed_attention import SMALL, make_batch

ROWS = [(3, 5, 0b10), (6, 1, 0), (1, 4, 0)]


def make_engine(folder: Path, *, packed: bool = False) -> Engine:
    engine = LocalEngine(
        EngineSpec(ModelConfig(path=str(folder), use_remove_padding=packed), "causal_lm", OptimConfig())
    )
    engine.initialize()
    return engine


@torch.no_grad()
def expected_log_probs(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    batch = make_batch(ROWS).batch
    log_probs = torch.zeros(batch["response_mask"].shape)
    for row, (_, num_response, _) in enumerate(ROWS):
        tokens = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        logits = model(tokens[None]).logits[0, -num_response - 1 : -1]
        chosen = tokens[-num_response:, None]
        log_probs[row, :num_response] = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
    return log_probs * batch["response_mask"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0),
        GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=8.0),
        CohereConfig(**SMALL, num_key_value_heads=2, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_change_their_logits_keep_to_their_own(
    tmp_path: Path, config: PretrainedConfig, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, packed=packed)
    assert not engine.root.head_apart
    log_probs = engine.infer_batch(make_batch(ROWS), micro_batch_size=3)["log_probs"]
    torch.testing.assert_close(log_probs, expected_log_probs(tmp_path), atol=1e-5, rtol=1e-5)


def test_a_head_that_is_not_what_it_seems_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a model that comes with code of its own."""
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1)
    assert make_engine(folder).root.head_apart
    forward = modeling_qwen2.Qwen2ForCausalLM.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = 3 * output.logits
        return output

    monkeypatch.setattr(modeling_qwen2.Qwen2ForCausalLM, "forward", scaled)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine = make_engine(folder)
    assert "the logits of Qwen2ForCausalLM are not its head's output" in caplog.text
    log_probs = engine.infer_batch(make_batch(ROWS), micro_batch_size=3)["log_probs"]
    torch.testing.assert_close(log_probs, expected_log_probs(folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_no_tensor_of_an_update_has_the_logits_of_a_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    vocabulary, hidden, num_tokens, chunk = 2000, 8, 120, 10_000
    engine = make_engine(make_tiny_model(tmp_path / "model", hidden=hidden, layers=1, vocab=vocabulary), packed=packed)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    data = make_batch([(2, num_tokens // 4, 0)] * 4)

    def loss_fn(output: dict[str, Tensor], micro_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return output["log_probs"].sum() + output["entropy"].sum(), {}

    with LargestTensor() as largest:
        engine.train_batch(data, loss_fn, micro_batch_size=4)
    weights = vocabulary * hidden
    assert chunk < largest.elements == weights < num_tokens * vocabulary


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=2),
        Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0),
    ],
    ids=["plain head", "own logits"],
)
def test_the_sum_of_squared_probabilities_is_that_of_each_row_alone(
    tmp_path: Path, config: PretrainedConfig, packed: bool
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine, data = make_engine(tmp_path, packed=packed), make_batch(ROWS)
    assert engine.root.head_apart == (config.model_type == "llama")
    found = engine.infer_batch(data, temperature=0.5, micro_batch_size=2, sum_pi_squared=True)
    model, batch = AutoModelForCausalLM.from_pretrained(tmp_path), data.batch
    expected = torch.zeros(batch["response_mask"].shape)
    for row, (_, num_response, _) in enumerate(ROWS):
        tokens = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        logits = model(tokens[None]).logits[0, -num_response - 1 : -1]
        expected[row, :num_response] = (logits / 0.5).softmax(-1).square().sum(-1)
    torch.testing.assert_close(found["sum_pi_squared"], expected * batch["response_mask"], atol=1e-5, rtol=1e-5)
    without = engine.infer_batch(data, temperature=0.5, micro_batch_size=2)
    assert list(without) == ["log_probs", "entropy"]
    assert all(torch.equal(without[name], found[name]) for name in without)
