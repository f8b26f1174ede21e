"""Fully sharded data parallelism: every rank holds a share of each parameter, its gradient and its optimizer state."""

from __future__ import annotations

import logging
import warnings
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from paceline.engine.base import Engine
from paceline.engine.distributed import ensure_process_group, gather_objects
from paceline.engine.model import build_empty_model, build_model
from paceline.engine.registry import register_engine

# A linear head's output is a view. It is only read: see Engine._forward.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

logger = logging.getLogger(__name__)

T = TypeVar("T")


@register_engine("fsdp2")
class Fsdp2Engine(Engine):
    """`fully_shard` on each decoder layer and on the whole, over all ranks of the default group."""

    def _build_model(self) -> PreTrainedModel:
        """Rank 0 reads the weights and sends each rank its share, so a fresh value head is the same everywhere."""
        ensure_process_group(self.spec.device)
        train = self.spec.optim is not None
        if self.rank == 0:
            model = build_model(self.spec.model, self.spec.kind, train=train)
            full_weights = model.state_dict()
        else:
            model = build_empty_model(self.spec.model, self.spec.kind, train=train)
            full_weights = {}

        mesh = init_device_mesh(self.spec.device, (self.world_size,))
        for layer in _decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The gradient is to be the sum over ranks: each rank's loss is its share of the mini-batch's already.
                module.set_gradient_divide_factor(1.0)
                # gloo can sum, not scale and sum.
                module.set_force_sum_reduction_for_comms(True)

        set_model_state_dict(
            model, full_weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        # The tables of the rotary embeddings are in no state dict.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        return model

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def _gather(self, value: T) -> list[T]:
        return gather_objects(value)

    def _after_inference(self) -> None:
        # The root keeps its parameters whole for a backward pass, which here won't come.
        self.model.reshard()


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        logger.warning("%s names no layers to shard one by one: it is sharded as a whole.", type(model).__name__)
    return layers
