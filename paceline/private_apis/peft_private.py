"""Private names of peft: the switch of an adapted layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

TRIED_WITH = "0.21.2"


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """The model without its adapters.

    The public `enable_adapters` also changes requires_grad, which sharded parameters copy at their first use.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
