"""Private names of torch: oneDNN's linear layer, the shards of FSDP's first version, wrapped modules."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard

TRIED_WITH = "2.13.0"

FSDP1_PREFIX = "_fsdp_wrapped_module."
"""In the names of parameters of modules that FSDP1 wraps."""
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
"""In the names of parameters of modules whose activations are computed again."""


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """states @ weight.T + bias by oneDNN, as torch's compiler calls it. No gradients.

    `weight` is (out, in), or what `pack_linear_weight` made of it.
    """
    output: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return output


def pack_linear_weight(weight: Tensor, num_rows: int) -> Tensor:
    """A copy of `weight` in the order in which `onednn_linear` reads it fastest for that many rows of states."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
    return packed


def move_fsdp1(root: FullyShardedDataParallel, device: str) -> None:
    """Move all shards. `Module.to` would silently end the reduction of gradients."""
    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle = module._handle
        if handle is not None:
            handle.flat_param_to(torch.device(device))
            handle.flat_param._local_shard = handle.flat_param.data


def free_gradients_fsdp1(root: FullyShardedDataParallel) -> None:
    """Let go of gradients that the optimizer has dropped. FSDP1 itself would only do so in the next forward pass."""
    for module in FullyShardedDataParallel.fsdp_modules(root):
        handle = module._handle
        if handle is not None:
            handle._reset_flat_param_grad_info_if_needed()


def reshard_fsdp1(root: FullyShardedDataParallel) -> None:
    """Free the root's whole parameters, which it keeps for a backward pass. For more than one rank."""
    handle = root._handle
    assert handle is not None
    _reshard(root, handle, True)


def recomputes_activations(module: nn.Module) -> bool:
    """Whether torch's wrapper for activation checkpointing is around any layer."""
    return any(isinstance(part, CheckpointWrapper) for part in module.modules())


def is_compile_error(error: Exception) -> bool:
    """Whether torch.compile raised it."""
    from torch._dynamo.exc import TorchDynamoException  # loads the compiler: seconds

    return isinstance(error, TorchDynamoException)


def silence_mesh_advice() -> None:
    """No advice on the order of meshes that another library made."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
