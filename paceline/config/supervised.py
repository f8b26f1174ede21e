"""The configurations of training on given texts: supervised fine-tuning, reward models, DPO.

Each has the sections `data`, `model`, `engine`, `optim`, `trainer` and `ray_kwargs`, which mean the same in all three.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.config.field_rules import (
    Count,
    CountOrAll,
    LocalPaths,
    NotNegative,
    Positive,
    Range,
    UserDict,
    WholeNumber,
)
from paceline.config.model_sections import FsdpConfig, OptimConfig, PolicyModelConfig, TensorParallelConfig
from paceline.config.run_sections import RayConfig, RunConfig

Truncation = Literal["error", "drop", "left", "right"]
DpoForm = Literal["sigmoid", "sigmoid_norm", "ipo"]


@dataclass(frozen=True)
class TextDataConfig:
    """Files of texts, and how they become token ids."""

    train_files: LocalPaths | None = None
    """File or files to train on: parquet, JSON lines (.jsonl, .json) or CSV; patterns such as data/*.jsonl."""
    val_files: LocalPaths | None = None
    """The same for validation. null: no validation."""
    train_batch_size: Count = 256
    """Rows of an optimizer step, over all devices; >= 1."""
    val_batch_size: Count = 256
    """Rows of a validation batch, over all devices; >= 1. Changes memory, never the result."""
    micro_batch_size_per_gpu: Count | None = None
    """Rows per device and forward/backward pass, >= 1. Changes memory and speed, never the update. null: by tokens; 8
    if use_dynamic_bsz=False."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches of equal work, at most max_token_len_per_gpu tokens, instead of so many rows. null: unless
    micro_batch_size_per_gpu is set."""
    max_token_len_per_gpu: Count = 8192
    """Tokens per device and forward/backward pass, >= 1: with packing those of the rows, without it padding counts too.
    A longer row goes alone."""
    max_length: Count = 1024
    """Longest row in tokens, after the chat template; >= 1."""
    truncation: Truncation = "error"
    """What to do with a longer row: stop with an error, drop it, or cut its start (left) or its end (right)."""
    prompt_key: str = "prompt"
    """Column of the prompt: a chat (list of {role, content}) or a string."""
    apply_chat_template_kwargs: UserDict = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    shuffle: bool = True
    """Draw rows in a seeded random order, another one in each epoch."""
    seed: WholeNumber | None = None
    """Seed of that order, >= 0. null: trainer.seed."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than train_batch_size. false: train on it."""
    train_max_samples: CountOrAll = -1
    """Use only this many rows to train on, >= 1, or -1: all."""
    val_max_samples: CountOrAll = -1
    """Use only this many rows for validation, >= 1, or -1: all."""
    accept_changed_files: bool = False
    """Resume although training files are no longer those that the checkpoint was trained on: the epoch begins again."""


@dataclass(frozen=True)
class DialogueDataConfig(TextDataConfig):
    """Files of conversations, or of prompts with a response each."""

    messages_key: str = "messages"
    """Column of a conversation (list of {role, content}). Files without it have prompt_key and response_key."""
    response_key: str = "response"
    """Column of the response to the prompt, as text. Of such a row the response alone is trained."""
    trained_turns: Literal["all", "last"] = "all"
    """Which turns of the assistant in a conversation are trained: all, or the last alone."""


@dataclass(frozen=True)
class PairDataConfig(TextDataConfig):
    """Files of pairs: a prompt with a chosen and a rejected reply."""

    train_batch_size: Count = 64
    """Pairs of an optimizer step, over all devices; >= 1."""
    chosen_key: str = "chosen"
    """Column of the better reply, as text, or as a list of messages that follow the prompt."""
    rejected_key: str = "rejected"
    """Column of the other reply, as that of the better one."""


@dataclass(frozen=True)
class RatedPairDataConfig(PairDataConfig):
    """Pairs that may say how much better the chosen reply is."""

    margin_key: str = "margin"
    """Column of a number >= 0 by which the chosen reply should score higher at least. Rows without it have 0."""


@dataclass(frozen=True)
class TrainingEngineConfig:
    """Where and how the model is trained."""

    strategy: str | None = None
    """Training backend: local (one process, no collectives), fsdp or fsdp2 (any number of devices), or one of an
    optional package: torchtitan, veomni, megatron. null: local on one device, fsdp2 on more."""
    megatron: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=megatron."""
    torchtitan: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    grad_clip: Positive = 1.0
    """Largest global gradient norm, > 0."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """Where model and optimizer are between updates."""
    nccl_timeout: Count | None = None
    """Seconds that workers may wait for each other in one collective, >= 1. null: PyTorch's own limit."""


@dataclass(frozen=True)
class SupervisedTrainerConfig(RunConfig):
    """The run."""

    total_epochs: Count = 1
    """Passes over the training data, >= 1, unless total_training_steps says less or more."""
    experiment_name: str = "sft"
    """Names the run in trackers."""
    dry_run: bool = False
    """Check everything, print what the batch sizes come to, and stop."""


@dataclass(frozen=True)
class SupervisedConfig:
    """What the three have in common."""

    data: TextDataConfig = field(default_factory=TextDataConfig)
    """Texts."""
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The model that is trained."""
    engine: TrainingEngineConfig = field(default_factory=TrainingEngineConfig)
    """How it is trained."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Its optimizer."""
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    """Ray."""


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Everything that supervised fine-tuning reads."""

    data: DialogueDataConfig = field(default_factory=DialogueDataConfig)
    """Texts."""


@dataclass(frozen=True)
class PairLossConfig:
    """How pairs train a reward model."""

    center_rewards_coefficient: NotNegative = 0.0
    """Weight of (chosen score + rejected score)^2, >= 0, which keeps scores around 0. 0.01 is usual; 0: off."""


@dataclass(frozen=True)
class RewardModelTrainerConfig(SupervisedTrainerConfig):
    """The run."""

    experiment_name: str = "reward_model"
    """Names the run in trackers."""


@dataclass(frozen=True)
class RewardModelTrainingConfig(SupervisedConfig):
    """Everything that the training of a reward model reads."""

    data: RatedPairDataConfig = field(default_factory=RatedPairDataConfig)
    """Texts."""
    loss: PairLossConfig = field(default_factory=PairLossConfig)
    """What is minimised."""
    trainer: RewardModelTrainerConfig = field(default_factory=RewardModelTrainerConfig)
    """The run."""


@dataclass(frozen=True)
class DpoLossConfig:
    """Direct preference optimisation against a frozen copy of the model."""

    beta: Positive = 0.1
    """How much the log-ratio to the reference counts, > 0: small values let the model move far from it."""
    form: DpoForm = "sigmoid"
    """sigmoid: DPO. sigmoid_norm: with log-probs per token, so that length is no advantage; wants a larger beta. ipo:
    the squared distance of that difference per token from 1 / (2 beta)."""
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0
    """The share of pairs whose labels are taken to be wrong, in [0, 0.5). Not of ipo."""


@dataclass(frozen=True)
class DpoTrainerConfig(SupervisedTrainerConfig):
    """The run."""

    experiment_name: str = "dpo"
    """Names the run in trackers."""


@dataclass(frozen=True)
class DPOConfig(SupervisedConfig):
    """Everything that direct preference optimisation reads."""

    data: PairDataConfig = field(default_factory=PairDataConfig)
    """Texts."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))
    """Its optimizer."""
    loss: DpoLossConfig = field(default_factory=DpoLossConfig)
    """What is minimised."""
    trainer: DpoTrainerConfig = field(default_factory=DpoTrainerConfig)
    """The run."""
