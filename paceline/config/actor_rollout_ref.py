"""The policy: its model, its update, its rollout and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.common import KLKind, LossAggMode, ModelConfig, OptimConfig


@dataclass(frozen=True)
class PolicyModelConfig(ModelConfig):
    """The policy's model, whose tokenizer is that of the whole run."""

    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer. null: beside the model."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which policy loss the actor minimises."""

    loss_mode: str = "vanilla"
    """Name of a registered policy loss: vanilla (PPO's clipped surrogate, dual clip), gspo (one ratio per response) or
    cispo (a clipped weight)."""


@dataclass(frozen=True)
class ActorConfig:
    """The update of the policy."""

    strategy: str = "fsdp2"
    """Training backend: local (one process, no collectives) or fsdp2 (any number of devices)."""
    ppo_mini_batch_size: int = 256
    """Prompts (times rollout.n responses) per optimizer step, over all devices; >= 1.
    Divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: int = 8
    """Responses per device and forward/backward pass, >= 1. Changes memory and speed, never the update."""
    ppo_epochs: int = 1
    """Passes over the batch of a step, >= 1."""
    shuffle: bool = False
    """Deal the batch into mini-batches in a new seeded order in each epoch."""
    clip_ratio: float = 0.2
    """Clip range of the probability ratio, >= 0, unless low and high are given."""
    clip_ratio_low: float | None = None
    """Lower clip range, >= 0: ratios below 1 - clip_ratio_low are clipped. null: clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper clip range, >= 0: ratios above 1 + clip_ratio_high are clipped. null: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip, > 1: bound of ratio * |advantage| where the advantage is negative."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number, over the global mini-batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, >= 0."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss (GRPO's way)."""
    kl_loss_coef: float = 0.001
    """Weight of the KL loss, >= 0."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the KL loss. k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    grad_clip: float = 1.0
    """Largest global gradient norm, > 0."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of the actor."""


@dataclass(frozen=True)
class ValSamplingConfig:
    """How validation samples."""

    n: int = 1
    """Responses per prompt, >= 1."""
    do_sample: bool = False
    """False is greedy decoding; temperature, top_p and top_k then have no part."""
    temperature: float = 1.0
    """Sampling temperature, > 0."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: int = -1
    """Sample among the k most likely tokens, >= 1, or -1: no limit."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled."""

    name: str = "native"
    """Rollout engine: native, the embedded one."""
    n: int = 1
    """Responses per prompt, >= 1. Group estimators such as grpo need at least 2."""
    do_sample: bool = True
    """False is greedy decoding in training: for debugging."""
    temperature: float = 1.0
    """Sampling temperature, > 0. Log-probs are of the distribution at this temperature."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: int = -1
    """Sample among the k most likely tokens, >= 1, or -1: no limit."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token until data.max_response_length: for benchmarks."""
    max_num_seqs: int = 256
    """Responses decoded at the same time on a device, >= 1."""
    tensor_model_parallel_size: int = 1
    """Devices that share one rollout engine, >= 1. The native engine takes 1."""
    log_prob_micro_batch_size_per_gpu: int = 16
    """Responses per device and forward pass when log-probs are recomputed, >= 1."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """How validation samples."""


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: int = 16
    """Responses per device and forward pass, >= 1."""


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Actor, rollout and reference: one model in three parts."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The policy's model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Its update."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Its sampling."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Its frozen copy."""
