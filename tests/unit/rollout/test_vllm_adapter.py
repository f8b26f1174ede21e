"""What vLLM is told of an adapter, without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from paceline.engine.lora import LoraSpec, adapter_tensors, add_adapter
from paceline.rollout.vllm_adapter import adapted_layers
from tests.tiny import make_tiny_model


@pytest.mark.parametrize("targets", ["all-linear", "q_proj", ["up_proj", "self_attn.v_proj", "lm_head"]])
def test_the_layers_that_an_adapter_must_have_are_those_that_peft_gives_one(
    targets: str | list[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = adapted_layers(model, targets)
    add_adapter(model, LoraSpec(2, target_modules=targets), str(folder))
    came = {name for name, _ in adapter_tensors(model.state_dict(), lambda tensor: tensor)}
    assert came == {f"base_model.model.{layer}.lora_{letter}.weight" for layer in layers for letter in "AB"}
