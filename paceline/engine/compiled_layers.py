"""torch.compile of a model's decoder layers, for the passes of an engine.

Each layer but the last is compiled by itself: what surrounds it (sharding, gradient checkpointing, the rollout's own
calls) stays as it is, and layers of one kind share their code. The last one computes only tokens that are asked for.
Attention within packed sequences is called as it is, since the lengths are others in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from paceline.engine.packed_attention import PACKED_SDPA, packed_sdpa
from paceline.errors import ConfigError
from paceline.private_apis.torch_private import is_compile_error
from paceline.private_apis.transformers_private import decoder_layers


class CompiledLayers:
    """The layers of one model. The first call of each kind compiles: some 20 seconds."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)[:-1]
        self._compiled = [(layer, _compiled(layer)) for layer in layers]
        AttentionInterface.register(PACKED_SDPA, torch.compiler.disable(_attention))

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Within this context the layers are compiled, also where backward passes call them again."""
        for layer, compiled in self._compiled:
            layer.forward = compiled
        try:
            yield
        finally:
            for layer, _ in self._compiled:
                del layer.forward


@contextmanager
def compile_errors(path: str | None) -> Iterator[None]:
    """A compiler that fails, or that is not there, as an error that says what to set."""
    try:
        yield
    except RuntimeError as error:
        if not is_compile_error(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.use_torch_compile=True: the layers of {path} can't be compiled here: {reason} "
            "Set model.use_torch_compile=False, or install a C++ compiler (on a GPU: Triton)."
        ) from error


class _Lengths:
    """Lengths of packed sequences in a box that the compiler does not look into: their values would become code."""

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


def _compiled(layer: nn.Module) -> Callable[..., Any]:
    compiled = torch.compile(layer.forward, dynamic=True)

    def forward(*args: Any, packed_lengths: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        if packed_lengths is not None:
            kwargs["packed_lengths"] = _Lengths(packed_lengths)
        return compiled(*args, **kwargs)

    return forward


def _attention(*args: Any, packed_lengths: tuple[int, ...] | _Lengths, **kwargs: Any) -> tuple[Tensor, None]:
    """`packed_sdpa` for layers that are compiled and for those that are not."""
    lengths = packed_lengths.values if isinstance(packed_lengths, _Lengths) else packed_lengths
    return packed_sdpa(*args, packed_lengths=lengths, **kwargs)
