"""The private names of peft that we use: they are there, and do what we take them to do."""

from __future__ import annotations

from importlib.metadata import version

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from paceline.private_apis import peft_private


def test_they_were_tried_with_this_version() -> None:
    assert version("peft") == peft_private.TRIED_WITH


@torch.no_grad()
def test_adapters_are_off_within_the_context_and_train_on_after_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    states = torch.ones(1, 4)
    plain = model(states)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
    adapted = model(states)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not torch.equal(adapted, plain)
    with peft_private.adapters_disabled(model):
        assert torch.equal(model(states), plain)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert torch.equal(model(states), adapted)
