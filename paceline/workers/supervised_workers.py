"""The workers that train on given texts: one engine, and for DPO a frozen reference beside it.

A row of a batch has one sequence, or two that are compared: the chosen and the rejected one. Rows are dealt to ranks as
a whole; here their sequences are laid out one under another, and stay together in micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from paceline.algorithms.masking import masked_sum
from paceline.algorithms.supervised_losses import (
    is_per_token,
    pair_score_losses,
    preference_losses,
    response_log_probs,
)
from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.config.derived import FORWARD_ROWS, UPDATE_ROWS, by_tokens, pipeline_parallel_size, tensor_parallel_size
from paceline.engine import Engine, LossFn, MicroBatchSize
from paceline.engine.hf_models import ModelKind, write_model
from paceline.engine.lora import LoraSpec
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch
from paceline.workers.losses import MiniBatch
from paceline.workers.role_worker import RoleWorker, RunContext, built, micro_batches, role_method, storage_errors

Supervised = TypeVar("Supervised", bound=SupervisedConfig)


class SupervisedWorker(RoleWorker, Generic[Supervised]):
    """A model that is trained on texts. A subclass says with which loss."""

    leaves_inputs_alone = True
    kind: ClassVar[ModelKind] = "causal_lm"
    sequences_per_row: ClassVar[int] = 1

    def __init__(self, config: Supervised, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.config = config
        self.engine: Engine | None = None

    @property
    def trained_engine(self) -> Engine | None:
        return self.engine

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config
        model = config.model
        self.engine = self.build_engine(
            config.engine.strategy,
            model,
            kind=self.kind,
            optim=config.optim,
            grad_clip=config.engine.grad_clip,
            tensor_model_parallel_size=tensor_parallel_size(config.engine),
            pipeline_model_parallel_size=pipeline_parallel_size(config.engine),
            lora=LoraSpec(model.lora_rank, model.lora_alpha, model.target_modules) if model.lora_rank > 0 else None,
            offload=config.engine.fsdp_config,
        )

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_model(self, data: DataProto) -> dict[str, float]:
        """One optimizer step on the dealt rows; its metrics."""
        sequences = self.sequences_of(data)
        return self.train(
            built(self.engine),
            sequences,
            lambda _, mini_batch: self.loss(mini_batch),
            prefix="train",
            **self.sizes(UPDATE_ROWS),
        )

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def measure(self, data: DataProto) -> DataProto:
        """What validation needs of each row: columns (rows,)."""
        return DataProto.from_dict(tensors=self.measured(self.sequences_of(data)))

    @role_method(Dispatch.ONE_TO_ALL)
    def export_model(self, folder: str) -> None:
        """Write the model as a Hugging Face folder, with LoRA merged."""
        engine = built(self.engine)
        weights = {name: tensor.cpu() for name, tensor in engine.named_full_weights() if engine.rank == 0}
        if engine.rank == 0:
            with storage_errors(folder):
                write_model(engine.spec.model, self.kind, weights, Path(folder))

    def sizes(self, usual_rows: int) -> MicroBatchSize:
        data = self.config.data
        rows = data.micro_batch_size_per_gpu
        dynamic = by_tokens(data.use_dynamic_bsz, rows, otherwise=True)
        sizes = micro_batches(dynamic, rows, data.max_token_len_per_gpu, usual_rows=usual_rows)
        return {**sizes, "rows_per_group": self.sequences_per_row}

    def sequences_of(self, data: DataProto) -> DataProto:
        """A row for each sequence, those of one row one under another; the counts of mini-batches follow."""
        count = self.sequences_per_row
        if count == 1:
            return data
        assert data.batch is not None
        columns = {
            name: column.reshape(len(data) * count, -1) if column.dim() > 1 else column.repeat_interleave(count)
            for name, column in data.batch.items()
        }
        meta: dict[str, Any] = dict(data.meta_info)
        if "mini_batches" in meta:
            meta["mini_batches"] = [
                {**counts, "rows_per_shard": counts["rows_per_shard"] * count} for counts in meta["mini_batches"]
            ]
        return DataProto.from_dict(tensors=columns, meta_info=meta)

    # What a kind of training defines.

    def loss(self, mini_batch: MiniBatch) -> LossFn:
        """The loss of a micro-batch as its share in that of the whole batch."""
        raise NotImplementedError

    def measured(self, sequences: DataProto) -> dict[str, Tensor]:
        """Columns (rows,) of sequences, without gradients."""
        raise NotImplementedError


class DialogueWorker(SupervisedWorker[SFTConfig]):
    """Supervised fine-tuning: every trained token of the whole batch weighs the same."""

    def loss(self, mini_batch: MiniBatch) -> LossFn:
        def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            mask = micro_batch["response_mask"]
            loss = -mini_batch.per_token(masked_sum(output["log_probs"], mask))
            return loss, {"entropy": mini_batch.per_token(masked_sum(output["entropy"].detach(), mask))}

        return loss_fn

    def measured(self, sequences: DataProto) -> dict[str, Tensor]:
        log_probs = built(self.engine).infer_batch(sequences, **self.sizes(FORWARD_ROWS))["log_probs"]
        return {"loss": -log_probs.sum(dim=-1), "weight": sequences.batch["response_mask"].sum(dim=-1).float()}


class PairWorker(SupervisedWorker[Supervised]):
    """Rows of a chosen and a rejected sequence; every pair of the whole batch weighs the same."""

    sequences_per_row = 2

    def pair_losses(self, values: Tensor, sequences: TensorDict) -> Tensor:
        """(pairs,) of one value for each sequence."""
        raise NotImplementedError

    def values(self, output: dict[str, Tensor], sequences: TensorDict) -> Tensor:
        """One value (sequences,) for each, by which the two of a pair are compared."""
        raise NotImplementedError

    def with_columns(self, sequences: DataProto) -> DataProto:
        """With further columns that the loss needs."""
        return sequences

    def sequences_of(self, data: DataProto) -> DataProto:
        return self.with_columns(super().sequences_of(data))

    def loss(self, mini_batch: MiniBatch) -> LossFn:
        def share(of_pairs: Tensor, is_pair: Tensor) -> Tensor:
            return torch.where(is_pair, of_pairs, 0.0).sum() / max(mini_batch.num_sequences, 1)

        def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            # Rows that fill up a rank have an empty response mask.
            is_pair = micro_batch["response_mask"].any(dim=-1)[0::2]
            values = self.values(output, micro_batch)
            margin = (values[0::2] - values[1::2]).detach()
            metrics = {"accuracy": share((margin > 0).float(), is_pair), "margin": share(margin, is_pair)}
            return share(self.pair_losses(values, micro_batch), is_pair), metrics

        return loss_fn

    def measured(self, sequences: DataProto) -> dict[str, Tensor]:
        assert sequences.batch is not None
        output = built(self.engine).infer_batch(sequences, **self.sizes(FORWARD_ROWS))
        values = self.values(output, sequences.batch)
        losses = self.pair_losses(values, sequences.batch)
        return {
            "loss": losses,
            "weight": torch.ones_like(losses),
            "chosen": values[0::2].contiguous(),
            "rejected": values[1::2].contiguous(),
        }


class PairScoreWorker(PairWorker[RewardModelTrainingConfig]):
    """A reward model: the score at the last token of the chosen text should be the higher one."""

    kind = "sequence_classification"

    def values(self, output: dict[str, Tensor], sequences: TensorDict) -> Tensor:
        return output["scores"]

    def pair_losses(self, values: Tensor, sequences: TensorDict) -> Tensor:
        center = self.config.loss.center_rewards_coefficient
        ranking, centering = pair_score_losses(values[0::2], values[1::2], sequences["margin"][0::2], center)
        return ranking + centering


class PreferenceWorker(PairWorker[DPOConfig]):
    """DPO: the model against a frozen copy of what it was at the start, which with LoRA is itself without adapters."""

    reference: Engine | None = None

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        config = self.config
        if config.model.lora_rank == 0:
            self.reference = self.build_engine(
                config.engine.strategy,
                config.model,
                kind=self.kind,
                tensor_model_parallel_size=tensor_parallel_size(config.engine),
                pipeline_model_parallel_size=pipeline_parallel_size(config.engine),
                offload=config.engine.fsdp_config,
            )

    def with_columns(self, sequences: DataProto) -> DataProto:
        engine = built(self.engine if self.reference is None else self.reference)
        with engine.without_adapter():
            log_probs = engine.infer_batch(sequences, **self.sizes(FORWARD_ROWS))["log_probs"]
        return sequences.union(DataProto.from_dict(tensors={"ref_log_prob": log_probs}))

    def values(self, output: dict[str, Tensor], sequences: TensorDict) -> Tensor:
        per_token, mask = is_per_token(self.config.loss.form), sequences["response_mask"]
        return response_log_probs(output["log_probs"] - sequences["ref_log_prob"], mask, per_token=per_token)

    def pair_losses(self, values: Tensor, sequences: TensorDict) -> Tensor:
        settings = self.config.loss
        return preference_losses(
            values[0::2],
            values[1::2],
            form=settings.form,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )
