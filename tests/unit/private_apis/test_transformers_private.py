"""The private names of transformers that we use: they are there, and do what we take them to do."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from paceline.private_apis import transformers_private


@pytest.fixture
def model() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).eval()


def test_they_were_tried_with_this_major_version() -> None:
    assert version("transformers").split(".")[0] == transformers_private.TRIED_WITH.split(".")[0]


def test_the_attention_is_replaced_within_the_context_alone(model: PreTrainedModel) -> None:
    calls: list[int] = []

    def counting(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object):
        calls.append(query.shape[2])
        return query.transpose(1, 2), None

    AttentionInterface.register("counting", counting)
    ids = torch.tensor([[3, 4, 5]])
    with transformers_private.attention_replaced(model, "counting"):
        assert transformers_private.attention_name(model) == "counting"
        model(input_ids=ids)
    assert calls == [3, 3, 3]
    assert transformers_private.attention_name(model) == "sdpa"
    model(input_ids=ids)
    assert len(calls) == 3


def test_a_model_names_its_decoder_layers(model: PreTrainedModel) -> None:
    layers = transformers_private.decoder_layers(model)
    assert layers == list(model.model.layers)
    assert all(type(layer) is Qwen2DecoderLayer for layer in layers)
