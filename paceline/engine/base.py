"""The engine interface, and everything that does not depend on how a model is spread over devices.

An engine owns one model and, if it trains, its optimizer. It takes this rank's rows of a mini-batch and a loss, and
makes one optimizer step whose result depends neither on the micro-batch size nor on the number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from paceline.config import ModelConfig, OptimConfig
from paceline.engine.checkpoint import Snapshot, TrainingState, load_training_state, take_snapshot, write_snapshot
from paceline.engine.logprobs import token_log_probs_and_entropy
from paceline.engine.microbatch import Window, split_micro_batches
from paceline.engine.model import ModelKind
from paceline.engine.optim import LearningRate, make_optimizer, make_schedule
from paceline.errors import NonFiniteError

if TYPE_CHECKING:
    from paceline.protocol import DataProto

T = TypeVar("T")

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


class Engine(ABC):
    """One model on this rank's share of the devices.

    `initialize`, `train_batch`, `infer_batch`, `named_full_weights`, `save`, `snapshot` and `load` are collective:
    every rank calls them, in the same order. Received batches are never written to. Between calls the model is in eval
    mode and holds no gradients. Only `initialize` draws random numbers.
    """

    model: PreTrainedModel
    optimizer: AdamW | None = None

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.num_steps = 0
        self._learning_rate: LearningRate | None = None

    def initialize(self) -> None:
        """Read the model and make the optimizer. A head that the weights lack is drawn from rank 0's random state."""
        if self.spec.optim is not None:
            self._learning_rate = make_schedule(self.spec.optim, self.spec.total_optimizer_steps)
        self.model = self._build_model()
        if self.spec.optim is not None:
            self.optimizer = make_optimizer(self.model.parameters(), self.spec.optim)

    def train_batch(
        self, data: DataProto, loss_fn: LossFn, *, micro_batch_size: int, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which `data` is this rank's part.

        Gives the metric sums of `loss_fn`, `loss`, `grad_norm` (before clipping) and `lr` (of this step), all over the
        whole mini-batch and so equal on all ranks. A loss or gradient that is not finite raises NonFiniteError on every
        rank and leaves weights and optimizer as they were.
        """
        optimizer, learning_rate = self.optimizer, self._learning_rate
        if optimizer is None or learning_rate is None:
            raise RuntimeError("this engine has no optimizer; give its EngineSpec an `optim` to train.")
        sums: dict[str, list[Tensor]] = defaultdict(list)
        self.model.train()
        try:
            for micro_batch in self._equal_counts(split_micro_batches(data.batch, micro_batch_size)):
                if micro_batch is None:
                    self._forward_idle().backward()
                    continue
                loss, metric_sums = loss_fn(self._forward(micro_batch, temperature), micro_batch.to(self.device))
                loss.backward()
                for name, value in {**metric_sums, "loss": loss}.items():
                    sums[name].append(value.detach())
            metrics = self._sum_over_ranks({name: math.fsum(map(float, values)) for name, values in sums.items()})
            grad_norm = self._clip_gradients()
            lr = learning_rate(self.num_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
            self.model.eval()
        self.num_steps += 1
        return {**metrics, "grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
    def infer_batch(self, data: DataProto, *, micro_batch_size: int, temperature: float = 1.0) -> dict[str, Tensor]:
        """What the model says of this rank's rows, float32, in main memory.

        causal_lm: `log_probs` and `entropy` (batch, response) at `temperature`. value: `values` (batch, response), each
        from the position that predicts the response token. Both are 0 outside `response_mask`.
        sequence_classification: `scores` (batch,), at the last token that `attention_mask` covers.
        """
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for micro_batch in self._equal_counts(split_micro_batches(data.batch, micro_batch_size)):
            if micro_batch is None:
                self._forward_idle()
                continue
            for name, value in self._forward(micro_batch, temperature).items():
                parts[name].append(value.cpu())
        self._after_inference()
        return {name: torch.cat(values) for name, values in parts.items()}

    def named_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every entry of the Hugging Face model's state dict, whole, tied ones under each of their names.

        One tensor at a time is gathered, so a rank never holds more than its shares and the largest tensor. Every rank
        must iterate to the end. Tensors may be the live parameters: copy what must outlast the next step.
        """
        for name, value in self.model.state_dict().items():
            yield name, _full(value.detach())

    def save(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder and, if this engine trains, the optimizer's state beside them."""
        self.write(self.snapshot(), folder)
        self._gather(None)  # No rank returns before rank 0 has written.

    def snapshot(self) -> Snapshot:
        """A copy of what `save` writes, in the main memory of rank 0. Later steps don't change it."""
        return take_snapshot(self._training_state(), rank=self.rank)

    def write(self, snapshot: Snapshot, folder: str | Path) -> None:
        """The slow half of `save`. Not collective, and may run in a thread while the engine trains on."""
        write_snapshot(snapshot, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on where `save` was called, possibly with another number of ranks or another backend.

        Learning rate and the other hyperparameters are those of this engine's spec.
        """
        self.num_steps = load_training_state(
            Path(folder),
            self._training_state(),
            model=self.spec.model,
            kind=self.spec.kind,
            rank=self.rank,
            gather=self._gather,
        )

    def to(self, device: str) -> None:
        """Move the model and the optimizer's state, as to make room for another role."""
        self.model.to(device)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if value.dim() > 0:  # AdamW keeps its step counts in main memory.
                        state[name] = value.to(device)
        self.device = torch.device(device)

    @property
    def module(self) -> PreTrainedModel | None:
        """The whole model, when this process holds it and a rollout may use it as it is."""
        return None

    # What a backend defines.

    @abstractmethod
    def _build_model(self) -> PreTrainedModel:
        """The model on this rank's device. Backward passes must leave the *sum* of all ranks' gradients."""

    @property
    def rank(self) -> int:
        """This process among those that hold the model."""
        return 0

    @property
    def world_size(self) -> int:
        """Processes that share the model."""
        return 1

    def _gather(self, value: T) -> list[T]:
        """What each of the `world_size` ranks passed."""
        return [value]

    def _after_inference(self) -> None:  # noqa: B027 - most backends keep nothing
        """Give back what forward passes without a backward pass keep."""

    # Shared steps.

    def _training_state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, self.num_steps)

    def _forward(self, micro_batch: TensorDict, temperature: float) -> dict[str, Tensor]:
        if self.spec.kind == "sequence_classification":
            return {"scores": self._scores(micro_batch)}
        response_mask = micro_batch["response_mask"]
        num_columns = response_mask.shape[-1]
        window = Window.of_responses(micro_batch["attention_mask"], num_columns)
        input_ids = micro_batch["input_ids"]
        tokens = input_ids[:, input_ids.shape[-1] - num_columns : window.right].to(self.device)
        num_kept = tokens.shape[-1]
        # The last token predicts nothing that is asked for.
        inputs = self._model_inputs(micro_batch, Window(window.left, window.right - 1))
        if self.spec.kind == "causal_lm":
            logits = self.model(**inputs, logits_to_keep=num_kept).logits[:, -num_kept:]
            log_probs, entropy = token_log_probs_and_entropy(logits, tokens, temperature)
            output = {"log_probs": log_probs, "entropy": entropy}
        else:
            output = {"values": self.model(**inputs).logits[:, -num_kept:, 0].float()}
        outside = response_mask.to(self.device) == 0
        return {
            name: pad(value, (0, num_columns - num_kept)).masked_fill(outside, 0.0) for name, value in output.items()
        }

    def _scores(self, micro_batch: TensorDict) -> Tensor:
        inputs = self._model_inputs(micro_batch, Window.of(micro_batch["attention_mask"]))
        scores = self.model(**inputs).logits[..., 0].float()
        columns = torch.arange(1, scores.shape[-1] + 1, device=self.device)
        last = (inputs["attention_mask"] * columns).argmax(dim=-1, keepdim=True)
        return scores.gather(-1, last).squeeze(-1)

    def _model_inputs(self, micro_batch: TensorDict, window: Window) -> dict[str, Tensor | bool]:
        columns = ("input_ids", "attention_mask", "position_ids")
        inputs = {name: micro_batch[name][:, window.left : window.right].to(self.device) for name in columns}
        return {**inputs, "use_cache": False}

    def _equal_counts(self, micro_batches: list[TensorDict]) -> list[TensorDict | None]:
        """Padded with None to the largest count of any rank: a forward pass may be collective."""
        longest = max(self._gather(len(micro_batches)))
        return [*micro_batches, *[None] * (longest - len(micro_batches))]

    def _forward_idle(self) -> Tensor:
        """A forward pass beside ranks that have more micro-batches than this one; gives a zero with zero gradients."""
        ones = torch.ones(1, 2, dtype=torch.int64)
        columns = {"input_ids": ones, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
        output = self._forward(TensorDict({**columns, "response_mask": ones[:, 1:]}, batch_size=[1]), temperature=1.0)
        return 0.0 * torch.stack([value.sum() for value in output.values()]).sum()

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over all ranks; NonFiniteError if the loss of any rank is not finite."""
        by_rank = self._gather(sums)
        broken = {rank: part["loss"] for rank, part in enumerate(by_rank) if not math.isfinite(part["loss"])}
        if broken:
            losses = ", ".join(f"{loss} on rank {rank}" for rank, loss in broken.items())
            raise NonFiniteError(f"optimizer step {self.num_steps}: the loss is {losses}; the weights are unchanged.")
        names = sorted({name for part in by_rank for name in part})
        return {name: math.fsum(part.get(name, 0.0) for part in by_rank) for name in names}

    def _clip_gradients(self) -> float:
        """Scale the gradients to a global norm of at most `grad_clip`; gives the norm before that."""
        norm = float(_full(clip_grad_norm_(self.model.parameters(), self.spec.grad_clip)))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"optimizer step {self.num_steps}: the gradient norm is {norm} on rank {self.rank}; "
                "the weights are unchanged."
            )
        return norm


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
