"""The engine interface, and everything that does not depend on how a model is spread over devices.

An engine owns one model and, if it trains, its optimizer. It takes this rank's rows of a mini-batch and a loss, and
makes one optimizer step whose result depends neither on the micro-batch size nor on the number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from paceline.engine.answers import ROUNDING, AnswerModel, settle_shortcuts
from paceline.engine.training_state import (
    Snapshot,
    TrainingState,
    full_tensor,
    load_training_state,
    named_full_tensors,
    take_snapshot,
    write_snapshot,
)
from paceline.engine.inputs import packed_call, padded_call, two_sequences
from paceline.engine.lora import adapter_off, add_adapter
from paceline.engine.microbatch import split_micro_batches
from paceline.engine.hf_models import build_model
from paceline.engine.optim import LearningRate, make_optimizer, make_schedule
from paceline.engine.packed_attention import check_packing, packed_attention
from paceline.engine.engine_interface import EngineSpec, LossFn
from paceline.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from paceline.protocol import DataProto

T = TypeVar("T")
Part = Literal["parameters", "optimizer"]
"""What is moved between the device and main memory."""


class Engine(ABC):
    """One model on this rank's share of the devices.

    `initialize`, `train_batch`, `infer_batch`, `named_full_weights`, `save`, `snapshot` and `load` are collective:
    every rank calls them, in the same order. Received batches are never written to. Between calls the model is in eval
    mode and holds no gradients. Only `initialize` draws random numbers.
    """

    model: PreTrainedModel
    root: nn.Module
    """What is called: an AnswerModel around `model`, or what the backend wraps around that."""
    optimizer: AdamW | None = None
    takes_lora: ClassVar[bool] = False
    """Whether this backend trains adapters."""
    takes_bfloat16: ClassVar[bool] = True
    """Whether `_precision`, or the backend itself, computes in `compute_dtype`."""
    takes_offload: ClassVar[bool] = True
    """Whether `_move` can take away what this backend holds."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.lora is not None and not self.takes_lora:
            raise ConfigError(f"{type(self).__name__} has no LoRA; set strategy=local or fsdp2, or model.lora_rank=0.")
        if spec.model.compute_dtype != "float32" and not self.takes_bfloat16:
            raise ConfigError(f"{type(self).__name__} computes in float32; set model.compute_dtype=float32.")
        if (spec.param_offload or spec.optimizer_offload) and not self.takes_offload:
            raise ConfigError(
                f"{type(self).__name__} does not offload; set param_offload=False and optimizer_offload=False in "
                "fsdp_config."
            )
        self.spec = spec
        self.device = torch.device(spec.device)
        self.num_steps = 0
        self._learning_rate: LearningRate | None = None
        self._packs = False
        self._away: set[Part] = set()
        """What is in main memory now and is brought to the device for calls."""

    def initialize(self) -> None:
        """Read the model and make the optimizer. A head that the weights lack is drawn from rank 0's random state."""
        if self.spec.optim is not None:
            self._learning_rate = make_schedule(self.spec.optim, self.spec.total_optimizer_steps)
        self.model = self._build_model()
        if self.spec.lora is not None:
            add_adapter(self.model, self.spec.lora, self.spec.model.path)
        self._answers = AnswerModel(self.model, self.spec.kind)
        self.root = self._distribute(self._answers)
        self._check_model()
        if self.spec.optim is not None:
            self.optimizer = make_optimizer(self.model.parameters(), self.spec.optim)
        offload: dict[Part, bool] = {"parameters": self.spec.param_offload, "optimizer": self.spec.optimizer_offload}
        self._put_away({part for part, wanted in offload.items() if wanted})

    def train_batch(
        self,
        data: DataProto,
        loss_fn: LossFn,
        *,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on the mini-batch of which `data` is this rank's part.

        Micro-batches have `micro_batch_size` rows, or equal work of at most `max_tokens` tokens (see `microbatch`).

        Gives the metric sums of `loss_fn`, `loss`, `grad_norm` (before clipping) and `lr` (of this step), all over the
        whole mini-batch and so equal on all ranks. A loss or gradient that is not finite raises NonFiniteError on every
        rank and leaves weights and optimizer as they were.
        """
        optimizer, learning_rate = self.optimizer, self._learning_rate
        if optimizer is None or learning_rate is None:
            raise RuntimeError("this engine has no optimizer; give its EngineSpec an `optim` to train.")
        sums: dict[str, list[Tensor]] = defaultdict(list)
        with self._training(optimizer):
            with self._calls():
                for rows in self._micro_batches(data, micro_batch_size, max_tokens):
                    if rows is None:
                        self._forward_idle().backward()
                        continue
                    micro_batch = data.batch[rows]
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
        self.num_steps += 1
        return {**metrics, "grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
    def infer_batch(
        self,
        data: DataProto,
        *,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        """What the model says of this rank's rows, in their order, float32, in main memory. Micro-batches as above.

        causal_lm: `log_probs` and `entropy` (batch, response) at `temperature`. value: `values` (batch, response), each
        from the position that predicts the response token. Both are 0 outside `response_mask`.
        sequence_classification: `scores` (batch,), at the last token that `attention_mask` covers.
        """
        parts: dict[str, list[Tensor]] = defaultdict(list)
        order: list[Tensor] = []
        with self.on_device(), self._calls():
            for rows in self._micro_batches(data, micro_batch_size, max_tokens):
                if rows is None:
                    self._forward_idle()
                    continue
                order.append(rows)
                for name, value in self._forward(data.batch[rows], temperature).items():
                    parts[name].append(value.cpu())
            self._after_inference()
        places = torch.cat(order).argsort()
        return {name: torch.cat(values)[places] for name, values in parts.items()}

    def named_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every entry of the Hugging Face model's state dict, whole, tied ones under each of their names.

        With LoRA the adapters are merged into the weights: it is the state dict of the model as it answers.
        One tensor at a time is gathered, so a rank never holds more than its shares and the largest tensor. Every rank
        must iterate to the end. Tensors may be the live parameters: copy what must outlast the next step.
        """
        with self.on_device():
            yield from named_full_tensors(self._training_state())

    def save(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder and, if this engine trains, the optimizer's state beside them.

        With LoRA, the adapter alone in peft's format in place of the weights.
        """
        self.write(self.snapshot(), folder)
        self._gather(None)  # No rank returns before rank 0 has written.

    def snapshot(self) -> Snapshot:
        """A copy of what `save` writes, in the main memory of rank 0. Later steps don't change it."""
        with self.on_device(optimizer=True):
            return take_snapshot(self._training_state(), rank=self.rank)

    def write(self, snapshot: Snapshot, folder: str | Path) -> None:
        """The slow half of `save`. Not collective, and may run in a thread while the engine trains on."""
        write_snapshot(snapshot, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on where `save` was called, possibly with another number of ranks or another backend.

        Learning rate and the other hyperparameters are those of this engine's spec.
        """
        with self.on_device(optimizer=True):
            self.num_steps = load_training_state(
                Path(folder),
                self._training_state(),
                model=self.spec.model,
                kind=self.spec.kind,
                rank=self.rank,
                gather=self._gather,
            )

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within this context the model answers as before LoRA: for inference with the reference."""
        return adapter_off(self.model) if self.spec.lora is not None else nullcontext()

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Within this context the parameters (and the optimizer's state) are on the device, whatever is offloaded.

        Every call of an engine does this for itself. Around several calls, they move once.
        """
        needed: set[Part] = {"parameters", "optimizer"} if optimizer else {"parameters"}
        brought = self._away & needed
        for part in sorted(brought):
            self._move(part, self.device.type)
        self._away -= brought
        try:
            yield
        finally:
            self._put_away(brought)

    def to(self, device: str) -> None:
        """Change the device that calls run on, and move what is not offloaded there."""
        parts: set[Part] = {"parameters", "optimizer"}
        for part in sorted(parts - self._away):
            self._move(part, device)
        self.device = torch.device(device)

    @property
    def module(self) -> PreTrainedModel | None:
        """The whole model, when this process holds it and a rollout may use it as it is."""
        return None

    def _put_away(self, parts: set[Part]) -> None:
        for part in sorted(parts):
            self._move(part, "cpu")
        self._away |= parts
        if parts and self.device.type != "cpu":
            torch.accelerator.empty_cache()  # else the memory would be this process's still

    def _move(self, part: Part, device: str) -> None:
        if part == "parameters":
            self._move_parameters(device)
        elif self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if value.dim() > 0:  # Step counts are single numbers, and stay where AdamW wants them.
                        state[name] = value.to(device)

    # What a backend defines.

    @abstractmethod
    def _distribute(self, answers: AnswerModel) -> nn.Module:
        """The model on this rank's device, to be called as `answers` is, with its parameters whole during the call.

        Backward passes must leave the *sum* of all ranks' gradients.
        """

    def _build_model(self) -> PreTrainedModel:
        """The model in main memory, with its weights or, if `_distribute` brings them, without."""
        return build_model(self.spec.model, self.spec.kind, train=self.spec.optim is not None)

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

    def _move_parameters(self, device: str) -> None:
        self.root.to(device)

    def _precision(self) -> AbstractContextManager[None]:
        """Forward passes are made in this context, which has them compute in `compute_dtype`."""
        dtype = self.compute_dtype
        return torch.autocast(self.device.type, dtype) if dtype != torch.float32 else nullcontext()

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip all gradients; gives their global norm before that."""
        return clip_grad_norm_(self.model.parameters(), max_norm)

    # Shared steps.

    @contextmanager
    def _training(self, optimizer: AdamW) -> Iterator[None]:
        """In training mode and on the device; no gradients are left behind."""
        with self.on_device(optimizer=True):
            self.model.train()
            try:
                yield
            finally:
                optimizer.zero_grad(set_to_none=True)
                self.model.eval()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Numbers of forward and backward passes. What the model says is float32."""
        return getattr(torch, self.spec.model.compute_dtype)

    def _training_state(self) -> TrainingState:
        return TrainingState(self.model, self.root, self.optimizer, self.num_steps)

    @torch.no_grad()
    def _check_model(self) -> None:
        """What can't be known of a model without calling it."""
        rounding = ROUNDING[self.compute_dtype]
        with self._calls():
            call = padded_call(two_sequences(), self.spec.kind, self.device)
            with self._precision():
                settle_shortcuts(self._answers, self.root, call, rounding)
            if self.spec.model.use_remove_padding:
                check_packing(self.model, self._answer, rounding)
        self._packs = self.spec.model.use_remove_padding
        self._after_inference()

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """The model is called, and gradients are taken, within this context."""
        with self._answers.calls(), packed_attention(self.model) if self._packs else nullcontext():
            yield

    def _forward(self, micro_batch: TensorDict, temperature: float) -> dict[str, Tensor]:
        answers = self._answer(micro_batch, packed=self._packs, temperature=temperature)
        if self.spec.kind == "sequence_classification":
            return answers
        mask = micro_batch["response_mask"].to(self.device).bool()
        return {
            name: torch.zeros(mask.shape, device=self.device).masked_scatter(mask, answer)
            for name, answer in answers.items()
        }

    def _answer(self, micro_batch: TensorDict, *, packed: bool, temperature: float = 1.0) -> dict[str, Tensor]:
        make_call = packed_call if packed else padded_call
        with self._precision():
            return self.root(make_call(micro_batch, self.spec.kind, self.device), temperature)

    def _micro_batches(self, data: DataProto, size: int | None, max_tokens: int | None) -> list[Tensor | None]:
        mask = data.batch["attention_mask"]
        return split_micro_batches(
            mask, size, max_tokens, packed=self._packs, largest=lambda count: max(self._gather(count))
        )

    def _forward_idle(self) -> Tensor:
        """A forward pass beside ranks that have more micro-batches than this one; gives a zero with zero gradients."""
        output = self._forward(two_sequences(), temperature=1.0)
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
        norm = float(full_tensor(self._clip_grad_norm(self.spec.grad_clip)))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"optimizer step {self.num_steps}: the gradient norm is {norm} on rank {self.rank}; "
                "the weights are unchanged."
            )
        return norm
