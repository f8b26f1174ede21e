"""The MLP of a model's last layer, only on the tokens whose output is asked for.

After the last attention, tokens no longer depend on each other, and the output for the tokens of a prompt is never
used. A reward model needs one token of each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_LINEAR_LAYERS = {"gate_proj", "up_proj", "down_proj"}


def find_last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The gated MLP of Llama and its like at the end of `model`; None for another, such as a mixture of experts."""
    layers = getattr(model.base_model, "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    if mlp is None or {name.partition(".")[0] for name, _ in mlp.named_parameters()} != _LINEAR_LAYERS:
        return None
    return mlp


class WantedTokens:
    """Makes an MLP compute some tokens only; the others get zeros.

    By hooks: so the names of parameters stay, and sharding and gradient checkpointing work as before.
    """

    places: Tensor | None = None
    """(wanted,) in the flattened tokens; None for all. Gradient checkpointing needs them until the backward pass."""

    def __init__(self, mlp: nn.Module) -> None:
        self._shape: torch.Size | None = None
        """Of all tokens, while some of them are computed."""
        mlp.register_forward_pre_hook(self._take)
        mlp.register_forward_hook(self._put_back)

    def _take(self, mlp: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor | None:
        is_called_as_usual = len(arguments) == 1 and arguments[0].dim() == 3
        self._shape = arguments[0].shape if self.places is not None and is_called_as_usual else None
        if self._shape is None or self.places is None:
            return None
        return arguments[0].flatten(0, 1).index_select(0, self.places)[None]

    def _put_back(self, mlp: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self._shape is None or self.places is None:
            return None
        nothing = output.new_zeros(self._shape).flatten(0, 1)
        return nothing.index_copy_(0, self.places, output[0]).view(self._shape)
