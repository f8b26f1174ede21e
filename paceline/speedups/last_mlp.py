"""The MLP of a model's last layer, on no other tokens than those whose output is wanted.

Behind the last attention no token is seen by another: what the tokens of a prompt become there is never looked at. Of a
reward model, one token of each sequence is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_LINEAR_LAYERS = {"gate_proj", "up_proj", "down_proj"}


def find_last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The gated MLP of Llama and its like at the end of `model`; None for another, such as a mixture of experts."""
    layers: Any = getattr(model.base_model, "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    if mlp is None or {name.partition(".")[0] for name, _ in mlp.named_parameters()} != _LINEAR_LAYERS:
        return None
    return mlp


class WantedTokens:
    """Has an MLP compute some tokens alone; the others go past it.

    As hooks, so that the names of parameters stay, and whatever shards the model or computes it again for its gradients
    has its way with them.
    """

    places: Tensor | None = None
    """(wanted,) in the flattened tokens; None for all. Gradient checkpointing needs them until the backward pass."""

    def __init__(self, mlp: nn.Module) -> None:
        self._shape: torch.Size | None = None
        """Of all tokens, while some of them are computed."""
        mlp.register_forward_pre_hook(self._take)
        mlp.register_forward_hook(self._put_back)

    def _take(self, mlp: nn.Module, arguments: tuple[Any, ...]) -> Tensor | None:
        is_called_as_usual = len(arguments) == 1 and arguments[0].dim() == 3
        self._shape = arguments[0].shape if self.places is not None and is_called_as_usual else None
        if self._shape is None or self.places is None:
            return None
        return arguments[0].flatten(0, 1).index_select(0, self.places)[None]

    def _put_back(self, mlp: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self._shape is None or self.places is None:
            return None
        nothing = output.new_zeros(self._shape).flatten(0, 1)
        return nothing.index_copy_(0, self.places, output[0]).view(self._shape)
