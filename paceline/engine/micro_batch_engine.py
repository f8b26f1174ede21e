"""The algorithm that all engines share: micro-batches, sums over ranks, clipping, the optimizer step, offloading.

A subclass defines the model and how a micro-batch goes through it: `HfEngine` for Hugging Face's models,
`OwnModelEngine` for those of other libraries.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from transformers import PreTrainedModel

from paceline.config import OptimConfig
from paceline.engine.engine_interface import Engine, EngineSpec, LossFn, MicroBatchSize
from paceline.engine.microbatch import split_micro_batches
from paceline.engine.model_calls import two_sequences
from paceline.engine.optim import LearningRate, make_optimizer, make_schedule
from paceline.engine.top_tokens import Likeliest
from paceline.engine.training_state import Snapshot, TrainingState, full_tensor, write_snapshot
from paceline.errors import NonFiniteError

if TYPE_CHECKING:
    from paceline.protocol import DataProto

T = TypeVar("T")
Offloadable = Literal["parameters", "optimizer"]
"""What is moved between the device and main memory."""


class MicroBatchEngine(Engine):
    """An engine that calls its model on one micro-batch after the other."""

    model: nn.Module
    """Holds the parameters."""
    root: nn.Module
    """What is called, with a ModelCall and a temperature: see `answers.AnswerModel`."""
    optimizer: Optimizer | None = None
    _packs = False
    """Whether all sequences of a micro-batch go through the model in one row."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._learning_rate: LearningRate | None = None
        self._away: set[Offloadable] = set()
        """What is in main memory now and is brought to the device for calls."""

    def initialize(self) -> None:
        optim = self.spec.optim
        if optim is not None:
            self._learning_rate = make_schedule(optim, self.spec.total_optimizer_steps)
        self._set_up_model()
        if optim is not None:
            self.optimizer = self._make_optimizer(optim)
        offload: dict[Offloadable, bool] = {
            "parameters": self.spec.param_offload,
            "optimizer": self.spec.optimizer_offload,
        }
        self._put_away({part for part, wanted in offload.items() if wanted})

    def train_batch(
        self, data: DataProto, loss_fn: LossFn, *, temperature: float = 1.0, **size: Unpack[MicroBatchSize]
    ) -> dict[str, float]:
        optimizer, learning_rate = self.optimizer, self._learning_rate
        if optimizer is None or learning_rate is None:
            raise RuntimeError("this engine has no optimizer; give its EngineSpec an `optim` to train.")
        sums: dict[str, list[Tensor]] = defaultdict(list)
        columns = data.batch
        assert columns is not None
        with self._training(optimizer):
            with self._calls():
                for rows in self._micro_batches(columns, size):
                    if rows is None:
                        self._forward_idle().backward()
                        continue
                    micro_batch = columns[rows]
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
        temperature: float = 1.0,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
        **size: Unpack[MicroBatchSize],
    ) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = defaultdict(list)
        order: list[Tensor] = []
        columns = data.batch
        assert columns is not None
        with self.on_device(), self._calls():
            for rows in self._micro_batches(columns, size):
                if rows is None:
                    self._forward_idle()
                    continue
                order.append(rows)
                answers = self._forward(columns[rows], temperature, sum_pi_squared=sum_pi_squared, likeliest=likeliest)
                for name, value in answers.items():
                    parts[name].append(value.cpu())
            self._after_inference()
        places = torch.cat(order).argsort()
        return {name: torch.cat(values)[places] for name, values in parts.items()}

    def sum_over_ranks(self, value: float) -> float:
        return math.fsum(self._gather(value))

    def write(self, snapshot: Snapshot, folder: str | Path) -> None:
        write_snapshot(snapshot, Path(folder))

    def save(self, folder: str | Path) -> None:
        self.write(self.snapshot(), folder)
        self._gather(None)  # No rank returns before rank 0 has written.

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        needed: set[Offloadable] = {"parameters", "optimizer"} if optimizer else {"parameters"}
        brought = self._away & needed
        for part in sorted(brought):
            self._move(part, self.device.type)
        self._away -= brought
        try:
            yield
        finally:
            self._put_away(brought)

    def to(self, device: str) -> None:
        parts: set[Offloadable] = {"parameters", "optimizer"}
        for part in sorted(parts - self._away):
            self._move(part, device)
        self.device = torch.device(device)

    # What a subclass defines.

    @abstractmethod
    def _set_up_model(self) -> None:
        """Make `model` and `root`, on this rank's device. Backward passes must leave the *sum* of all ranks' gradients.

        Called once, by all ranks.
        """

    @abstractmethod
    def _answer(
        self,
        micro_batch: TensorDict,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
    ) -> dict[str, Tensor]:
        """Call the model. Each column is (asked,) float32, one number per response token, or per row for scores; of
        several tokens at a place it is (asked, k)."""

    def _calls(self) -> AbstractContextManager[None]:
        """The model is called, and gradients are taken, within this context."""
        return nullcontext()

    def _make_optimizer(self, config: OptimConfig) -> Optimizer:
        """AdamW, or an optimizer that keeps its moments under AdamW's names."""
        return make_optimizer(self.model.parameters(), config)

    def _gather(self, value: T) -> list[T]:
        """What each of the `world_size` ranks passed."""
        return [value]

    def _after_inference(self) -> None:
        """Free what forward passes keep for a backward pass."""

    def _move_parameters(self, device: str) -> None:
        self.root.to(device)

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip all gradients; returns their global norm before that."""
        return clip_grad_norm_(self.model.parameters(), max_norm)

    # Shared steps.

    def _training_state(self, model: PreTrainedModel) -> TrainingState:
        """What a checkpoint holds. `model` is the Hugging Face model, for its configuration and names."""
        spec = self.spec
        return TrainingState(
            model, self.root, self.optimizer, self.num_steps, spec.model, spec.kind, self.rank, self._gather
        )

    @contextmanager
    def _training(self, optimizer: Optimizer) -> Iterator[None]:
        """In training mode and on the device; no gradients are left behind."""
        with self.on_device(optimizer=True):
            self.model.train()
            try:
                yield
            finally:
                self._drop_gradients(optimizer)
                self.model.eval()

    def _put_away(self, parts: set[Offloadable]) -> None:
        for part in sorted(parts):
            self._move(part, "cpu")
        self._away |= parts
        if parts and self.device.type != "cpu":
            torch.accelerator.empty_cache()  # else this process would keep the memory

    def _move(self, part: Offloadable, device: str) -> None:
        if part == "parameters":
            self._move_parameters(device)
        elif self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if value.dim() > 0:  # Step counts are single numbers, and stay where AdamW wants them.
                        state[name] = value.to(device)

    def _forward(
        self,
        micro_batch: TensorDict,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
    ) -> dict[str, Tensor]:
        """The model's output as `infer_batch` returns it, differentiable, on the device."""
        answers = self._answer(micro_batch, temperature, sum_pi_squared=sum_pi_squared, likeliest=likeliest)
        if self.spec.kind == "sequence_classification":
            return answers
        mask = micro_batch["response_mask"].to(self.device).bool()
        return {name: _placed(answer, mask) for name, answer in answers.items()}

    def _forward_idle(self) -> Tensor:
        """A forward pass beside ranks with more micro-batches than this one; returns a zero with zero gradients."""
        output = self._forward(two_sequences(), temperature=1.0)
        return 0.0 * torch.stack([value.sum() for value in output.values()]).sum()

    def _micro_batches(self, columns: TensorDict, size: MicroBatchSize) -> list[Tensor | None]:
        return split_micro_batches(
            columns["attention_mask"],
            size.get("micro_batch_size"),
            size.get("max_tokens"),
            rows_per_group=size.get("rows_per_group", 1),
            packed=self._packs,
            largest=lambda count: max(self._gather(count)),
        )

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over all ranks; NonFiniteError if the loss of any rank is not finite."""
        by_rank = self._gather(sums)
        broken = {rank: part["loss"] for rank, part in enumerate(by_rank) if not math.isfinite(part["loss"])}
        if broken:
            losses = ", ".join(f"{loss} on rank {rank}" for rank, loss in broken.items())
            raise NonFiniteError(
                f"optimizer step {self.num_steps}: the loss is {losses}; the weights are unchanged.", what="loss"
            )
        names = sorted({name for part in by_rank for name in part})
        return {name: math.fsum(part.get(name, 0.0) for part in by_rank) for name in names}

    def _clip_gradients(self) -> float:
        """Scale the gradients to a global norm of at most `grad_clip`; returns the norm before that."""
        norm = float(full_tensor(self._clip_grad_norm(self.spec.grad_clip)))
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"optimizer step {self.num_steps}: the gradient norm is {norm} on rank {self.rank}; "
                "the weights are unchanged.",
                what="gradient",
            )
        return norm


def _placed(answer: Tensor, mask: Tensor) -> Tensor:
    """(asked, ...) at the places of the mask (batch, response), 0 elsewhere; differentiable."""
    whole = torch.zeros(*mask.shape, *answer.shape[1:], dtype=answer.dtype, device=mask.device)
    return whole.masked_scatter(mask.view(*mask.shape, *[1] * (answer.dim() - 1)), answer)
