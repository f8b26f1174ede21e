"""Fully sharded data parallelism: every rank holds a share of each parameter, its gradient and its optimizer state."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from transformers import PreTrainedModel

from paceline.engine.answers import ROUNDING, AnswerModel
from paceline.engine.distributed import AllRanks, ensure_process_group
from paceline.engine.engine_interface import MicroBatchSize, register_engine
from paceline.engine.hf_engine import HfEngine
from paceline.engine.hf_models import build_empty_model
from paceline.engine.model_calls import ModelCall, two_sequences
from paceline.engine.packed_attention import unknown_layers
from paceline.engine.sequence_parallel import SequenceGroup, heads_problem, ulysses_attention
from paceline.engine.shared_rows import SharedRows
from paceline.engine.training_state import set_weights
from paceline.errors import ConfigError
from paceline.private_apis.torch_private import free_gradients_fsdp1, move_fsdp1, reshard_fsdp1
from paceline.private_apis.transformers_private import decoder_layers

for _message in (
    # The module's output may be a view. It is only read: see MicroBatchEngine._forward.
    "FSDP2-wrapped module .* returned a view tensor",
    # FSDP1 on one rank has nothing to shard.
    "FSDP is switching to use `NO_SHARD`",
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    # Called by torch's own functions for checkpoints.
    "FSDP.state_dict_type",
):
    warnings.filterwarnings("ignore", message=_message)

logger = logging.getLogger(__name__)


class ShardedEngine(AllRanks, HfEngine):
    """The model in shares over all ranks of the default group; each decoder layer is gathered on its own."""

    def _build_model(self) -> PreTrainedModel:
        """Only rank 0 reads the weights, so a fresh value head is the same everywhere."""
        ensure_process_group(self.spec.device, self.spec.collective_timeout_seconds)
        if self.rank == 0:
            return super()._build_model()
        return build_empty_model(self.spec.model, self.spec.kind, train=self.spec.trains)

    def _distribute(self, answers: AnswerModel) -> nn.Module:
        """Rank 0 sends each rank its share."""
        full_weights = answers.model.state_dict() if self.rank == 0 else {}
        mesh = init_device_mesh(self.spec.device, (self.world_size,))
        root = self._shard(answers, layers_to_shard(answers.model), mesh)
        set_weights(root, full_weights, from_rank0=True)
        # The tables of the rotary embeddings are in no state dict.
        for buffer in root.buffers():
            dist.broadcast(buffer, src=0)
        return root

    @abstractmethod
    def _shard(self, answers: AnswerModel, layers: list[nn.Module], mesh: DeviceMesh) -> nn.Module:
        """`answers` with parameters in shares, gathered for each of `layers` and for the rest around their calls."""

    def _precision(self) -> AbstractContextManager[None]:
        """FSDP itself casts what it gathers: autocast would keep a copy of all weights until the backward pass."""
        return nullcontext()


@register_engine("fsdp2")
class Fsdp2Engine(ShardedEngine, SharedRows):
    """`fully_shard`: parameters are DTensors. Neighbours by rank may share sequences: see `sequence_parallel`."""

    root: Any
    """What `fully_shard` makes of an AnswerModel: a class of its own that is both an AnswerModel and an FSDPModule."""
    sequence_group: SequenceGroup | None = None

    def _set_up_model(self) -> None:
        super()._set_up_model()
        size = self.spec.ulysses_sequence_parallel_size
        if size > 1:
            self._share_sequences(size)

    @torch.no_grad()
    def _share_sequences(self, size: int) -> None:
        problem = heads_problem(self.model.config, size) or unknown_layers(self.model)
        if self.world_size % size:
            problem = f"{size} does not divide the {self.world_size} ranks"
        if not problem:
            whole = self._forward(two_sequences(), temperature=1.0)
            mesh = init_device_mesh(
                self.spec.device, (self.world_size // size, size), mesh_dim_names=("rows", "tokens")
            )
            self.row_group = mesh.get_group("tokens")
            self.sequence_group = SequenceGroup(self.row_group)
            with self._calls():
                shared = self._forward(two_sequences(), temperature=1.0)
            self._after_inference()
            largest = max(float(value.abs().max()) for value in whole.values())
            error = max(float((shared[name] - value).abs().max()) for name, value in whole.items())
            if not error <= ROUNDING[self.compute_dtype] * largest:
                problem = f"outputs differ by {error:.1g} when {size} ranks share them"
        if problem:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={size}: {type(self.model).__name__} can't share sequences: {problem}. "
                "Set it to another size, or to 1."
            )

    @contextmanager
    def _calls(self) -> Iterator[None]:
        with super()._calls(), ulysses_attention(self.model) if self.sequence_group is not None else nullcontext():
            yield

    def _answer_call(self, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        if self.sequence_group is None:
            return super()._answer_call(call, temperature)
        return self.sequence_group.answer(self.root, call, temperature)

    def _micro_batches(self, columns: TensorDict, size: MicroBatchSize) -> list[Tensor | None]:
        # A rank has its part of the tokens.
        if (tokens := size.get("max_tokens")) is not None:
            size = {**size, "max_tokens": tokens * self.spec.ulysses_sequence_parallel_size}
        return super()._micro_batches(columns, size)

    def _shard(self, answers: AnswerModel, layers: list[nn.Module], mesh: DeviceMesh) -> nn.Module:
        precision = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        for module in (*layers, answers):
            fully_shard(module, mesh=mesh, mp_policy=precision)
        sum_gradients(answers)
        return answers

    def _after_inference(self) -> None:
        # The root keeps its parameters whole for a backward pass, which here won't come.
        self.root.reshard()


@register_engine("fsdp")
class FsdpEngine(ShardedEngine):
    """`FullyShardedDataParallel`, FSDP's first version: parameters are pieces of one flat tensor per layer."""

    root: FullyShardedDataParallel

    def _shard(self, answers: AnswerModel, layers: list[nn.Module], mesh: DeviceMesh) -> nn.Module:
        root = FullyShardedDataParallel(
            answers,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
            # Without it, a module on a CPU is taken for one that is yet to be moved.
            device_id=torch.device(self.spec.device),
            device_mesh=mesh,
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=self.compute_dtype, reduce_dtype=torch.float32),
        )
        if self.world_size > 1:
            # FSDP1 would divide by the number of ranks.
            root.register_comm_hook(None, _sum_over_ranks)
        return root

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        return self.root.clip_grad_norm_(max_norm)

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        super()._drop_gradients(optimizer)
        free_gradients_fsdp1(self.root)

    def _move_parameters(self, device: str) -> None:
        move_fsdp1(self.root, device)

    def _after_inference(self) -> None:
        if self.world_size > 1:  # A single rank has nothing to shard.
            reshard_fsdp1(self.root)


def sum_gradients(root: nn.Module) -> None:
    """The gradient is to be the sum over ranks: each rank's loss is its share of the mini-batch's already."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo can sum, not scale and sum.
            module.set_force_sum_reduction_for_comms(True)


def _sum_over_ranks(state: None, gradient: Tensor, share: Tensor) -> None:
    dist.reduce_scatter_single(share, gradient)


def layers_to_shard(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, with a warning if the model names none."""
    layers = decoder_layers(model)
    if not layers:
        logger.warning("%s names no layers to shard one by one: it is sharded as a whole.", type(model).__name__)
    return layers
