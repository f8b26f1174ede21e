"""Packed == padded, and models that can't be packed are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.config import ModelConfig, OptimConfig
from paceline.engine import Engine, EngineSpec
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.hf_models import ModelKind
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from tests.tiny import make_tiny_model

KINDS: list[ModelKind] = ["causal_lm", "value", "sequence_classification"]
MAX_PROMPT, MAX_RESPONSE = 6, 5
LONG_PROMPT, LONG_RESPONSE = 40, 60

Row = tuple[int, int, int]
"""Tokens of the prompt, tokens of the response, and which of these have no weight, as bits."""


def make_engine(folder: Path, kind: ModelKind, *, packed: bool | None, train: bool = True) -> Engine:
    spec = EngineSpec(
        ModelConfig(path=str(folder), use_remove_padding=packed), kind, OptimConfig() if train else None, grad_clip=1e6
    )
    engine = LocalEngine(spec)
    torch.manual_seed(0)
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKind, tuple[Engine, Engine]]:
    """Padded and packed, of each kind."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, initializer_range=0.2)
    torch.manual_seed(1)
    classifier = tmp_path_factory.mktemp("classifier")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(classifier)
    folders = {"causal_lm": folder, "value": folder, "sequence_classification": classifier}
    return {kind: tuple(make_engine(folders[kind], kind, packed=packed) for packed in (False, True)) for kind in KINDS}


def make_batch(rows: list[Row], seed: int = 0) -> DataProto:
    prompt_width = max(prompt for prompt, _, _ in rows) + 1
    width = prompt_width + max(response for _, response, _ in rows) + 1
    generator = torch.Generator().manual_seed(seed)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    response_mask = torch.zeros(len(rows), width - prompt_width, dtype=torch.int64)
    for row, (prompt, response, holes) in enumerate(rows):
        attention_mask[row, prompt_width - prompt : prompt_width + response] = 1
        response_mask[row, :response] = torch.tensor([1 - (holes >> bit & 1) for bit in range(response)])
    return DataProto.from_dict(
        {
            # Padding has tokens too, which must not be seen.
            "input_ids": torch.randint(3, 99, (len(rows), width), generator=generator),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "targets": torch.randn(len(rows), response_mask.shape[-1], generator=generator),
        }
    )


def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    targets = micro_batch["targets"]
    wanted = [targets[:, 0] if value.dim() == 1 else targets for value in output.values()]
    losses = [((value - one) ** 2).sum() for value, one in zip(output.values(), wanted, strict=True)]
    return torch.stack(losses).sum() / 10.0, {}


def step(engine: Engine, data: DataProto, **sizes: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one step that leaves the engine as it was."""
    gradients: dict[str, Tensor] = {}

    def record(*_: Any) -> None:
        gradients.update({name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()})

    weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    handle = engine.optimizer.register_step_pre_hook(record)
    metrics = engine.train_batch(data, loss_fn, **sizes)
    handle.remove()
    engine.model.load_state_dict(weights)
    return metrics, gradients


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(st.integers(1, MAX_PROMPT), st.integers(0, MAX_RESPONSE), st.integers(0, 31)), min_size=1, max_size=6
    ),
    sizes=st.one_of(
        st.builds(lambda size: {"micro_batch_size": size}, st.integers(1, 7)),
        st.builds(lambda tokens: {"max_tokens": tokens}, st.integers(1, 60)),
    ),
)
@example(rows=[(3, 1, 0), (1, 1, 0), (6, 1, 0)], sizes={"micro_batch_size": 3})
@example(rows=[(2, 1, 0), (LONG_PROMPT, LONG_RESPONSE, 0b1011), (1, 5, 0), (4, 2, 0)], sizes={"max_tokens": 20})
@example(rows=[(2, 1, 0), (LONG_PROMPT, LONG_RESPONSE, 0b1011), (1, 5, 0), (4, 2, 0)], sizes={"micro_batch_size": 4})
@example(rows=[(2, 4, 0b1111), (3, 3, 0b111)], sizes={"micro_batch_size": 2})
def test_packed_equals_padded(
    engines: dict[ModelKind, tuple[Engine, Engine]], kind: ModelKind, rows: list[Row], sizes: dict[str, int]
) -> None:
    padded, packed = engines[kind]
    data = make_batch(rows)
    one, other = padded.infer_batch(data, micro_batch_size=1), packed.infer_batch(data, **sizes)
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=1e-5)
    metrics, gradients = step(padded, data, micro_batch_size=1)
    packed_metrics, packed_gradients = step(packed, data, **sizes)
    assert packed_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5, rtol=1e-4)


def test_the_attention_of_the_model_is_as_before_between_calls(
    engines: dict[ModelKind, tuple[Engine, Engine]],
) -> None:
    engine = engines["causal_lm"][1]
    engine.infer_batch(make_batch([(2, 3, 0)]), micro_batch_size=1)
    assert engine.module.config._attn_implementation == "sdpa"


def test_a_response_without_a_token_before_it_can_not_be_packed(
    engines: dict[ModelKind, tuple[Engine, Engine]],
) -> None:
    with pytest.raises(ValueError, match="without a token before it"):
        engines["causal_lm"][1].infer_batch(make_batch([(1, 2, 0), (0, 2, 0)]), micro_batch_size=2)


def test_positions_of_another_kind_can_not_be_packed(engines: dict[ModelKind, tuple[Engine, Engine]]) -> None:
    data = make_batch([(2, 3, 0)])
    data.batch["position_ids"] = data.batch["position_ids"] + 1
    with pytest.raises(ValueError, match=r"set model\.use_remove_padding=False"):
        engines["causal_lm"][1].infer_batch(data, micro_batch_size=1)


SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.2,
}
GPT2 = GPT2Config(vocab_size=99, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=2),
        Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
        MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3),
        Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4),
        GPT2,  # positions that are learnt
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_pass_on_the_lengths_can_be_packed(tmp_path: Path, config: PretrainedConfig) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    padded, packed = (make_engine(tmp_path, "causal_lm", packed=packed, train=False) for packed in (False, True))
    data = make_batch([(3, 5, 0), (6, 1, 0), (1, 30, 0)])
    one, other = padded.infer_batch(data, micro_batch_size=1), packed.infer_batch(data, micro_batch_size=3)
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        # A recurrent layer carries what it has seen on to the next sequence.
        (
            RecurrentGemmaConfig(**{**SMALL, "num_hidden_layers": 3}, lru_width=32),
            "a change of one changes what it says of the other",
        ),
        (FalconConfig(**SMALL, alibi=True), "can't be given their lengths"),
        (Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]), "sliding attention: conv"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_would_mix_sequences_are_refused_or_left_unpacked(
    tmp_path: Path, config: PretrainedConfig, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_engine(tmp_path, "causal_lm", packed=False, train=False)
    with caplog.at_level("INFO"):
        assert not make_engine(tmp_path, "causal_lm", packed=None, train=False)._packs
    [said] = [record.message for record in caplog.records if "not packed" in record.message]
    assert reason in said
    with pytest.raises(ConfigError, match=rf"use_remove_padding=True: .*{reason}.* Set model.use_remove_padding=False"):
        make_engine(tmp_path, "causal_lm", packed=True, train=False)


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
@pytest.mark.parametrize("initializer_range", [0.02, 0.2])
def test_attention_across_sequences_does_not_escape_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: ModelKind, initializer_range: float
) -> None:
    """Also in a model whose weights are so small that attention changes little."""
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1, initializer_range=initializer_range)
    make_engine(folder, kind, packed=True)
    monkeypatch.setattr("paceline.engine.packed_attention.PACKED_SDPA", "crossing")

    def crossing(*args: Any, packed_lengths: tuple[int, ...], **kwargs: Any) -> tuple[Tensor, None]:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("crossing", crossing)
    with pytest.raises(ConfigError, match="can't keep packed sequences apart"):
        make_engine(folder, kind, packed=True)


def test_a_model_that_keeps_sequences_apart_is_packed_unless_it_is_switched_off(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1)
    assert make_engine(folder, "causal_lm", packed=None)._packs
    assert not make_engine(folder, "causal_lm", packed=False)._packs
