"""The interface of a training backend: what it is made from, what a caller may rely on, and the backends by name.

`hf_engine` and `backends/` implement it; `workers` calls it. The contract is held by
`tests/contract/test_engine_contract.py`, which every backend runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, Unpack

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from paceline.catalog import BACKENDS, BackendEntry, Registry
from paceline.config import ModelConfig, OptimConfig
from paceline.config.backend_limits import BFLOAT16, COMPILES, LORA, OFFLOAD, PACKING, ULYSSES, refusals
from paceline.engine.hf_models import ModelKind
from paceline.engine.lora import LoraSpec
from paceline.engine.top_tokens import Likeliest
from paceline.engine.training_state import Snapshot
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.protocol import DataProto

LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""From a micro-batch's model output and columns to (loss, sums of metrics).

The loss is divided by counts of the *global* mini-batch, so that the losses of micro-batches and ranks add up to the
mini-batch's. Metrics are sums too; the caller divides them once they have been added up.
"""


class MicroBatchSize(TypedDict, total=False):
    """How a batch is divided for the model; one of the first two (see `microbatch`)."""

    micro_batch_size: int | None
    """Rows of a micro-batch."""
    max_tokens: int | None
    """Tokens of a micro-batch, at most; micro-batches have about equal work."""
    rows_per_group: int
    """Consecutive rows that a loss compares, so that they stay in one micro-batch; micro_batch_size counts groups."""


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
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share each sequence, each with a part of its tokens; for backends that can."""
    pipeline_model_parallel_size: int = 1
    """So many such groups hold one model together, each some of its layers; for backends that can."""
    lora: LoraSpec | None = None
    """Adapters to train in place of all weights."""
    param_offload: bool = False
    """Keep the parameters in main memory between calls: see `Engine.on_device`."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in main memory between updates."""
    collective_timeout_seconds: float | None = None
    """How long ranks may wait for each other in one collective; None is PyTorch's own limit."""

    @property
    def trains(self) -> bool:
        return self.optim is not None


class Engine(ABC):
    """One model on this rank's share of the devices and, if it trains, its optimizer.

    It takes this rank's rows of a mini-batch and a loss, and makes one optimizer step whose result depends neither on
    the micro-batch size nor on the number of ranks.

    `initialize`, `train_batch`, `infer_batch`, `named_full_weights`, `save`, `snapshot` and `load` are collective:
    every rank calls them, in the same order. Received batches are never written to. Between calls the model is in eval
    mode and holds no gradients. Only `initialize` draws random numbers.
    """

    strategy: ClassVar[str] = ""
    """The name that it is registered under."""
    takes_lora: ClassVar[bool] = False
    """Whether this backend trains adapters."""
    takes_bfloat16: ClassVar[bool] = True
    """Whether this backend computes in `compute_dtype`."""
    takes_offload: ClassVar[bool] = True
    """Whether this backend can keep in main memory what it holds, between calls."""
    takes_ulysses: ClassVar[bool] = False
    """Whether ranks of this backend can share sequences."""
    takes_compile: ClassVar[bool] = False
    """Whether this backend compiles layers."""
    takes_several_tokens: ClassVar[bool] = False
    """Whether this backend gives log-probs of several tokens at a place."""
    takes_packing: ClassVar[bool] = True
    """Whether this backend takes sequences without padding, one after the other."""

    def __init__(self, spec: EngineSpec) -> None:
        asked = (
            (LORA, "model.lora_rank", 0 if spec.lora is None else spec.lora.rank),
            (BFLOAT16, "model.compute_dtype", spec.model.compute_dtype),
            (OFFLOAD, "param_offload", spec.param_offload),
            (OFFLOAD, "optimizer_offload", spec.optimizer_offload),
            (ULYSSES, "ulysses_sequence_parallel_size", spec.ulysses_sequence_parallel_size),
            (COMPILES, "model.use_torch_compile", spec.model.use_torch_compile),
            (PACKING, "model.use_remove_padding", spec.model.use_remove_padding),
        )
        if problems := list(refusals(_what_it_takes(type(self)), f"strategy={self.strategy}", asked)):
            raise ConfigError(problems)
        self.spec = spec
        self.device = torch.device(spec.device)
        self.num_steps = 0
        """Optimizer steps that were made, those before a checkpoint that was loaded included."""

    @abstractmethod
    def initialize(self) -> None:
        """Read the model and make the optimizer. A head that the weights lack is drawn from rank 0's random state."""

    @abstractmethod
    def train_batch(
        self, data: DataProto, loss_fn: LossFn, *, temperature: float = 1.0, **size: Unpack[MicroBatchSize]
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which `data` is this rank's part.

        Where `data` has `top_tokens`, the loss gets their `top_log_probs` (batch, response, k) too.
        Returns the metric sums of `loss_fn`, `loss`, `grad_norm` (before clipping) and `lr` (of this step), all over
        the whole mini-batch and so equal on all ranks. A loss or gradient that is not finite raises NonFiniteError on
        every rank and leaves weights and optimizer as they were.
        """

    @abstractmethod
    def infer_batch(
        self,
        data: DataProto,
        *,
        temperature: float = 1.0,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
        **size: Unpack[MicroBatchSize],
    ) -> dict[str, Tensor]:
        """The model's output for this rank's rows, in their order, float32, in main memory.

        causal_lm: `log_probs` and `entropy` (batch, response) at `temperature`; if it is asked for, `sum_pi_squared`,
        the squared probabilities of all tokens, summed. With `likeliest`, in place of these `top_tokens` (int32) and
        `top_log_probs` (batch, response, k), the likeliest first. value: `values` (batch, response), each from the
        position that predicts the response token. All are 0 outside `response_mask`.
        sequence_classification: `scores` (batch,), at the last token that `attention_mask` covers.
        """

    @abstractmethod
    def named_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every entry of the Hugging Face model's state dict, whole, tied ones under each of their names.

        With LoRA the adapters are merged into the weights. One tensor at a time is gathered, so a rank never holds more
        than its shares and the largest tensor. Every rank must iterate to the end. Tensors may be the live parameters:
        copy what must outlast the next step.
        """

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """With LoRA: A and B alone, whole, under the names of peft's file. As `named_full_weights` otherwise."""
        raise ConfigError(f"{type(self).__name__} has no LoRA adapter to give.")

    def weight_shapes(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """As `named_full_weights` or `named_adapter`, with shapes and dtypes alone; here of tensors that were gathered.

        Every rank must iterate to the end.
        """
        return self.named_adapter() if adapter else self.named_full_weights()

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """A copy of what `save` writes, in the main memory of rank 0. Later steps don't change it."""

    @abstractmethod
    def write(self, snapshot: Snapshot, folder: str | Path) -> None:
        """The slow half of `save`. Not collective, and may run in a thread while the engine trains on."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder and, if this engine trains, the optimizer's state beside them.

        With LoRA, the adapter alone in peft's format in place of the weights. Returns when the files are complete.
        """

    @abstractmethod
    def load(self, folder: str | Path) -> None:
        """Go on where `save` was called, possibly with another number of ranks or another backend.

        Learning rate and the other hyperparameters are those of this engine's spec.
        """

    @abstractmethod
    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Within this context the parameters (and the optimizer's state) are on the device, whatever is offloaded.

        Every call of an engine does this for itself. Around several calls, they move once.
        """

    @abstractmethod
    def to(self, device: str) -> None:
        """Change the device that calls run on, and move what is not offloaded there."""

    def sum_over_ranks(self, value: float) -> float:
        """The sum of what all ranks pass. Collective."""
        return value

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within this context the model has no LoRA adapters: for inference with the reference."""
        return nullcontext()

    @property
    def module(self) -> PreTrainedModel | None:
        """The whole model, when this process holds it and a rollout may use it as it is."""
        return None

    @property
    def rank(self) -> int:
        """This process among those that hold the model."""
        return 0

    @property
    def world_size(self) -> int:
        """Processes that share the model."""
        return 1


EngineClass = TypeVar("EngineClass", bound=type[Engine])
_ENGINES: Registry[type[Engine], BackendEntry] = Registry(BACKENDS)


_TAKES = {
    "lora": "takes_lora",
    "bfloat16": "takes_bfloat16",
    "offload": "takes_offload",
    "ulysses": "takes_ulysses",
    "compiles": "takes_compile",
    "packing": "takes_packing",
    "several_tokens": "takes_several_tokens",
}
"""What the catalogue knows of a backend, and what its class says of it."""


def register_engine(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: registers an engine as `strategy=name`. The catalogue says what the built-in ones take."""

    def decorate(engine: EngineClass) -> EngineClass:
        _ENGINES.register(name)(engine)
        engine.strategy = name
        if engine.__module__ == BACKENDS.modules.get(name):
            for ability, takes in _TAKES.items():
                setattr(engine, takes, getattr(BACKENDS.built_in[name], ability))
        else:
            BACKENDS.add(name, _what_it_takes(engine))
        return engine

    return decorate


def _what_it_takes(engine: type[Engine]) -> BackendEntry:
    """By what the class says; one that is no Engine, and says nothing, refuses by itself."""
    says: dict[str, Any] = {ability: getattr(engine, takes, True) for ability, takes in _TAKES.items()}
    return BackendEntry(**says)


def get_engine(name: str) -> type[Engine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
