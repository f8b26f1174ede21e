"""The value model."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.common import FsdpConfig, LossAggMode, OptimConfig, TensorParallelConfig, TrainedModelConfig
from paceline.config.field_rules import Count, Positive


@dataclass(frozen=True)
class CriticModelConfig(TrainedModelConfig):
    """The backbone under the value head."""

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """Where it is while others work."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model and its update. Used where algorithm.adv_estimator is gae."""

    strategy: str = "fsdp2"
    """Training backend, as the actor's; need not be the same."""
    megatron: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=megatron."""
    torchtitan: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The backbone under the value head; path null takes the actor's."""
    ppo_mini_batch_size: Count | None = None
    """Prompts (times rollout.n responses) per optimizer step, over all devices; >= 1. null: the actor's."""
    ppo_micro_batch_size_per_gpu: Count = 8
    """Responses per device and forward/backward pass, >= 1."""
    forward_micro_batch_size_per_gpu: Count = 16
    """Responses per device and forward pass when values are computed, >= 1."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches of equal work, by tokens instead of responses, in the update and when values are computed. null:
    the actor's."""
    ppo_max_token_len_per_gpu: Count = 32768
    """Tokens per device and forward/backward pass then, >= 1; as the actor's."""
    forward_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward pass when values are computed, >= 1. null: ppo_max_token_len_per_gpu."""
    ppo_epochs: Count | None = None
    """Passes over the batch of a step, >= 1. null: the actor's."""
    shuffle: bool = False
    """Deal the batch into mini-batches in a new seeded order in each epoch."""
    cliprange_value: Positive = 0.5
    """How far a value may move from the old one before its loss is clipped, > 0."""
    loss_agg_mode: LossAggMode = "token-mean"
    """As for the actor."""
    grad_clip: Positive = 1.0
    """Largest global gradient norm, > 0."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer of the critic."""
