"""Sections that several roles share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.config.field_rules import Count, Each, ModelPath, NotNegative, Positive, Range, Share

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = 1e-6
    """Peak learning rate, >= 0. 0 trains nothing."""
    betas: Annotated[tuple[float, float], Each(Range(0, 1, open_high=True))] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: Positive = 1e-8
    """Added to the denominator of AdamW, > 0."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, >= 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: constant, or linear or cosine down to lr * min_lr_ratio."""
    min_lr_ratio: Share = 0.0
    """Where linear and cosine end, as a share of lr, in [0, 1]."""
    lr_warmup_steps: Annotated[int, Range(0, also=-1)] = -1
    """Optimizer steps of linear warm-up, >= 0, or -1: lr_warmup_steps_ratio instead."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all optimizer steps, in [0, 1]."""


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face model: a folder or a hub id."""

    path: ModelPath | None = None
    """Folder or hub id. For the critic, null takes the actor's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    use_remove_padding: bool = False
    """Pack the sequences of a micro-batch into one row without padding. Changes memory and speed, never the result."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of forward and backward passes; weights and optimizer stay float32."""


@dataclass(frozen=True)
class TrainedModelConfig(ModelConfig):
    """A model that is trained."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class FrozenFsdpConfig:
    """Where a model that is not trained is while others work."""

    param_offload: bool = False
    """Keep the weights in main memory between calls. On a CPU they are there anyway."""


@dataclass(frozen=True)
class FsdpConfig(FrozenFsdpConfig):
    """Where a model and its optimizer are while others work, with local, fsdp and fsdp2."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in main memory between updates. On a CPU it is there anyway."""


@dataclass(frozen=True)
class TensorParallelConfig:
    """How a backend divides a model, where that is its strategy."""

    tensor_model_parallel_size: Count = 1
    """Devices that hold one model together, each a part of every layer, >= 1. Divides the devices of the pool."""
