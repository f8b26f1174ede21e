"""Private names of transformers: a model's attention, and the layers that are sharded one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

TRIED_WITH = "5.19.0"


def attention_name(model: PreTrainedModel) -> str:
    """Which attention of transformers' `AttentionInterface` the model uses, such as sdpa."""
    return str(model.config._attn_implementation)


@contextmanager
def attention_replaced(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within this context the model uses the attention registered as `name`.

    The public `set_attn_implementation` walks over all modules: too slow for every call.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that must stay whole on a device, as their classes say; may be none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
