"""The last layer's MLP computes the tokens whose answer is wanted, and nothing else changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DogeConfig, MixtralConfig, PretrainedConfig
from transformers.models.qwen2 import modeling_qwen2

from paceline.config import OptimConfig, TrainedModelConfig
from paceline.engine import EngineSpec
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.hf_models import ModelKind
from paceline.speedups.last_mlp import find_last_mlp
from tests.tiny import make_tiny_model
from tests.unit.engine.test_packed_attention import SMALL, loss_fn, make_batch

ROWS = [(7, 5, 0b10), (6, 1, 0), (1, 4, 0)]
WANTED = {"causal_lm": 9, "value": 9, "sequence_classification": 3}


class Keeping(LocalEngine):
    """Keeps the gradients of its last step."""

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        self.gradients = {name: value.grad.clone() for name, value in self.model.named_parameters()}
        return super()._clip_grad_norm(max_norm)


def make_engine(folder: Path, kind: ModelKind = "causal_lm", **settings: bool) -> Keeping:
    torch.manual_seed(0)  # for a head that the folder lacks
    engine = Keeping(EngineSpec(TrainedModelConfig(path=str(folder), **settings), kind, OptimConfig(lr=1e-3)))
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, initializer_range=0.2)


@pytest.mark.parametrize("kind", list(WANTED))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_answers_and_gradients_are_those_of_the_whole_layer(
    folder: Path, kind: ModelKind, packed: bool, checkpointing: bool
) -> None:
    data = make_batch(ROWS)
    settings = {"use_remove_padding": packed, "enable_gradient_checkpointing": checkpointing}
    short, whole = (make_engine(folder, kind, **settings) for _ in range(2))
    assert short.root.mlp_apart
    whole.root.mlp_apart = False
    seen: dict[Keeping, list[int]] = {short: [], whole: []}
    for engine, counts in seen.items():
        down: Any = engine.model.base_model.layers[-1].mlp.down_proj
        down.register_forward_hook(lambda _, args, __, counts=counts: counts.append(args[0].shape[:-1].numel()))
    for one, other in zip(*(engine.infer_batch(data, micro_batch_size=3).values() for engine in seen), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    for size in (2, 3):  # the second step is made with what the first has changed
        for engine in seen:
            engine.train_batch(data, loss_fn, micro_batch_size=size)
        assert all(gradient.abs().sum() > 0 for gradient in whole.gradients.values())
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(short.gradients[name], gradient, atol=2e-6, rtol=1e-4, msg=name)
    assert seen[short][0] == WANTED[kind] < seen[whole][0]
    passes = 2 if checkpointing else 1
    assert sum(seen[short]) == (1 + 2 * passes) * WANTED[kind]


def test_behind_a_call_the_model_computes_all_tokens(folder: Path) -> None:
    engine, plain = make_engine(folder), AutoModelForCausalLM.from_pretrained(folder)
    engine.infer_batch(make_batch(ROWS), micro_batch_size=3)
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(engine.module(tokens).logits, plain(tokens).logits)

    def failing(*_: Any) -> Any:
        raise RuntimeError("a loss that fails")

    with pytest.raises(RuntimeError, match="a loss that fails"):
        engine.train_batch(make_batch(ROWS), failing, micro_batch_size=3)
    with torch.no_grad():
        torch.testing.assert_close(engine.module(tokens).logits, plain(tokens).logits)


def test_a_model_that_looks_at_other_tokens_later_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a model that comes with code of its own."""
    forward = modeling_qwen2.Qwen2DecoderLayer.forward

    def with_token_before(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        hidden = forward(self, *args, **kwargs)
        return hidden + hidden.roll(1, dims=1)

    monkeypatch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", with_token_before)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine = make_engine(folder)
    assert "the last MLP of Qwen2ForCausalLM is not all that follows its last attention" in caplog.text
    assert engine.root.head_apart
    assert not engine.root.mlp_apart


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2),
        # Its MLP has the names of Llama's, and experts beside them.
        DogeConfig(**SMALL, num_key_value_heads=2, is_moe=True, num_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_mixture_of_experts_is_left_alone(config: PretrainedConfig) -> None:
    assert find_last_mlp(AutoModelForCausalLM.from_config(config)) is None


def test_an_mlp_that_is_called_in_another_way_computes_all_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, expected = make_batch(ROWS), make_engine(folder).infer_batch(make_batch(ROWS), micro_batch_size=3)
    call = modeling_qwen2.Qwen2MLP.__call__
    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "__call__", lambda self, states: call(self, x=states))
    found = make_engine(folder).infer_batch(data, micro_batch_size=3)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-6, rtol=1e-5)
