"""What an engine is to hold, and the loss that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensordict import TensorDict
from torch import Tensor

from paceline.config import ModelConfig, OptimConfig
from paceline.engine.lora import LoraSpec
from paceline.engine.hf_models import ModelKind

LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""From a micro-batch's model output and columns to (loss, sums of metrics).

The loss is divided by counts of the *global* mini-batch, so that the losses of micro-batches and ranks add up to the
mini-batch's. Metrics are sums too; the caller divides them once they have been added up.
"""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is to hold."""

    model: ModelConfig
    """Where the weights come from."""
    kind: ModelKind
    """What the model gives: see `Engine.infer_batch`."""
    optim: OptimConfig | None = None
    """None: for inference only."""
    grad_clip: float = 1.0
    """Largest global gradient norm (> 0)."""
    total_optimizer_steps: int | None = None
    """Length of the learning-rate schedule; not needed for a constant one."""
    device: str = "cpu"
    """Device type: cpu, cuda, npu."""
    tensor_model_parallel_size: int = 1
    """Ranks that hold one model together, each a part of every layer; for backends that can."""
    lora: LoraSpec | None = None
    """Adapters to train in place of all weights."""
    param_offload: bool = False
    """Keep the parameters in main memory between calls: see `Engine.on_device`."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in main memory between updates."""
