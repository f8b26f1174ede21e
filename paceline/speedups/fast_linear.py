"""Linear layers by oneDNN on a CPU, where that is faster than what torch does by itself. Results differ in rounding.

Training: on AMD's processors MKL, with which torch multiplies matrices, computes float32 with AVX2, also where there is
AVX-512. oneDNN uses AVX-512: products of a training step are twice as fast.

Decoding: a product of few rows waits for its weights. A copy in the order in which oneDNN reads them comes faster.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from paceline.private_apis.torch_private import onednn_linear, pack_linear_weight

SMALLEST_PRODUCT = 2**23
"""Multiplications from which on oneDNN pays: a call of it costs some tens of microseconds more."""
PACKED_ELEMENTS = 2**18
"""Weights of a linear layer from which on packing them pays: a call of oneDNN costs some 40 microseconds."""
_PACKED_FOR_ROWS = 64
"""What the order of packed weights is chosen for; it is as good for any number but one, which goes without."""


def faster_linear(device: str) -> AbstractContextManager[object]:
    """A context in which linear layers are called, also when gradient checkpointing calls them again."""
    return OneDnnLinear() if device == "cpu" and mkl_keeps_to_avx2() else nullcontext()


def recompute_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For gradient checkpointing: the contexts of a layer's first call and of its second, in the backward pass."""
    return nullcontext(), OneDnnLinear() if OneDnnLinear.num_entered else nullcontext()


@cache
def mkl_keeps_to_avx2() -> bool:
    """Whether this is a processor of AMD with AVX-512, and torch has both libraries."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:  # there is none but on Linux
        return False
    return (
        "AuthenticAMD" in processor
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
    )


class OneDnnLinear(TorchFunctionMode):
    """Within this context, `linear` of float32 on a CPU goes to oneDNN, if it is large enough."""

    num_entered: ClassVar[int] = 0

    def __enter__(self) -> OneDnnLinear:
        OneDnnLinear.num_entered += 1
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        OneDnnLinear.num_entered -= 1

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is linear and not kwargs and _pays(*args):
            return _Linear.apply(*args)
        return func(*args, **(kwargs or {}))


def _pays(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        states.dim() > 1
        and type(weight) in (Tensor, nn.Parameter)  # not a DTensor, say
        and states.dtype == weight.dtype == torch.float32
        and states.device.type == "cpu"
        and states.numel() * len(weight) >= SMALLEST_PRODUCT
        and not torch.is_autocast_enabled("cpu")
    )


class _LinearContext(Protocol):
    """What torch keeps of a call for its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _LinearContext, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        of_states, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(states if of_weight else None, weight if of_states else None)
        return onednn_linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        of_states, of_weight, *of_bias = ctx.needs_input_grad
        return (
            onednn_linear(grad, weight.T) if of_states else None,
            _weight_gradient(grad.flatten(0, -2), states.flatten(0, -2)) if of_weight else None,
            *(grad.flatten(0, -2).sum(dim=0) if wanted else None for wanted in of_bias),
        )


def _weight_gradient(grad: Tensor, states: Tensor) -> Tensor:
    """grad.T @ states. The first factor of a product is copied, so that is the smaller one."""
    if grad.shape[1] <= states.shape[1]:
        return onednn_linear(grad.T, states.T)
    return onednn_linear(states.T, grad.T).T.contiguous()


def packed_linear(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer; on a CPU, if it is a large one, with a copy of its weights that products of few rows read faster."""
    if (
        type(layer) is not nn.Linear
        or layer.weight.device.type != "cpu"
        or layer.weight.dtype != torch.float32
        or layer.weight.numel() < PACKED_ELEMENTS
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.is_available()
    ):
        return layer
    weight, bias = pack_linear_weight(layer.weight, _PACKED_FOR_ROWS), layer.bias

    def apply(hidden: Tensor) -> Tensor:
        if hidden.numel() == hidden.shape[-1]:
            output: Tensor = layer(hidden)
            return output
        return onednn_linear(hidden, weight, bias)

    return apply
