"""The MLP of a model's last layer, on no other tokens than those whose output is wanted.

Behind the last attention no token is seen by another: what the tokens of a prompt become there is never looked at. Of a
reward model, one token of each sequence is left.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

_LINEAR_LAYERS = ("gate_proj", "up_proj", "down_proj")


def find_last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The gated MLP of Llama and its like at the end of `model`; None for another, such as a mixture of experts."""
    layers: Any = getattr(model.base_model, "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    return mlp if all(hasattr(mlp, name) for name in _LINEAR_LAYERS) else None


class WantedTokens:
    """Has an MLP compute some tokens alone; the others go past it.

    As hooks, so that the names of parameters stay, and whatever shards the model or computes it again for its gradients
    has its way with them.
    """

    places: Tensor | None = None
    """(wanted,) in the flattened tokens; None for all. Gradient checkpointing needs them until the backward pass."""

    def __init__(self, mlp: nn.Module) -> None:
        mlp.register_forward_pre_hook(self._take)
        mlp.register_forward_hook(self._put_back)

    def _take(self, mlp: nn.Module, arguments: tuple[Tensor]) -> Tensor | None:
        if self.places is None:
            return None
        (hidden,) = arguments
        self._shape = hidden.shape
        return hidden.flatten(0, 1).index_select(0, self.places)[None]

    def _put_back(self, mlp: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor | None:
        if self.places is None:
            return None
        nothing = output.new_zeros(self._shape).flatten(0, 1)
        return nothing.index_copy(0, self.places, output[0]).view(self._shape)
