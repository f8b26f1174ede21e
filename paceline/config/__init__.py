"""The typed configuration: frozen dataclasses, one per section, every default on its field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from paceline.config.agents import AgentConfig, MultiTurnConfig
from paceline.config.distillation import DistillationConfig, DistillationLossConfig, TeacherModelConfig
from paceline.config.field_rules import OnlyWith
from paceline.config.model_sections import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CriticModelConfig,
    EngineKwargsConfig,
    FrozenFsdpConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    PolicyModelConfig,
    RefConfig,
    RolloutConfig,
    TrainedModelConfig,
    ValSamplingConfig,
)
from paceline.config.reward import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardKwargsConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    SandboxConfig,
    SourceWeights,
)
from paceline.config.run_sections import (
    AlgorithmConfig,
    CustomDatasetConfig,
    DataConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PfPpoConfig,
    PlacementConfig,
    RayConfig,
    RolloutCorrectionConfig,
    RunConfig,
    SamplerConfig,
    ScheduleConfig,
    TrainerConfig,
    TransferQueueConfig,
)
from paceline.config.supervised import (
    DPOConfig,
    RewardModelTrainingConfig,
    SFTConfig,
    SupervisedConfig,
)


@dataclass(frozen=True)
class PPOConfig:
    """Everything that a run reads."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """The policy."""
    critic: Annotated[CriticConfig, OnlyWith.CRITIC] = field(default_factory=CriticConfig)
    """The value model."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """How responses are scored."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A function of yours that scores."""
    distillation: Annotated[DistillationConfig, OnlyWith.TEACHER] = field(default_factory=DistillationConfig)
    """Teachers."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
    """Ray."""
    transfer_queue: TransferQueueConfig = field(default_factory=TransferQueueConfig)
    """Data plane."""


AnyRunConfig = PPOConfig | SupervisedConfig
"""Of a run of any kind."""
ROOTS: tuple[type[AnyRunConfig], ...] = (PPOConfig, SFTConfig, RewardModelTrainingConfig, DPOConfig)
"""The whole configurations of each kind of run."""

__all__ = [
    "ROOTS",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "AnyRunConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CustomDatasetConfig",
    "CustomRewardConfig",
    "DPOConfig",
    "DataConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "EngineKwargsConfig",
    "FilterGroupsConfig",
    "FrozenFsdpConfig",
    "FsdpConfig",
    "KLControlConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PPOConfig",
    "PfPpoConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "PolicyModelConfig",
    "RayConfig",
    "RefConfig",
    "RewardKwargsConfig",
    "RewardModelConfig",
    "RewardModelModelConfig",
    "RewardModelTrainingConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SFTConfig",
    "SamplerConfig",
    "SandboxConfig",
    "ScheduleConfig",
    "SourceWeights",
    "SupervisedConfig",
    "TeacherModelConfig",
    "TrainedModelConfig",
    "TrainerConfig",
    "TransferQueueConfig",
    "ValSamplingConfig",
]
