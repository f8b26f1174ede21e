"""The policy: its model, its update, its rollout and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from paceline.config.common import (
    FrozenFsdpConfig,
    FsdpConfig,
    KLKind,
    LossAggMode,
    OptimConfig,
    TensorParallelConfig,
    TrainedModelConfig,
)
from paceline.config.field_rules import (
    Count,
    CountOrAll,
    ModelPath,
    ModuleOrFile,
    NotNegative,
    OnlyWith,
    Positive,
    Probability,
    Range,
    Temperature,
    WholeNumber,
)


@dataclass(frozen=True)
class PolicyModelConfig(TrainedModelConfig):
    """The policy's model, whose tokenizer is that of the whole run."""

    tokenizer_path: ModelPath | None = None
    """Folder or hub id of the tokenizer. null: beside the model."""
    external_lib: ModuleOrFile | None = None
    """A Python module, or a .py file, that every process of the run imports before names are checked: for estimators,
    losses, scorers, engines and rollouts that it registers. null: none."""
    lora_rank: WholeNumber = 0
    """Rank of LoRA adapters, >= 0: only they are trained, and the reference is the model without them. 0: no LoRA, all
    weights are trained."""
    lora_alpha: Positive = 16
    """Adapters are scaled by lora_alpha / lora_rank, > 0."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter: all-linear (all but the head), a name such as q_proj, or a list of names."""


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
    """Training backend: local (one process, no collectives), fsdp or fsdp2 (any number of devices), or one of an
    optional package: torchtitan, veomni, megatron."""
    megatron: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=megatron."""
    torchtitan: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    ppo_mini_batch_size: Count = 256
    """Prompts (times rollout.n responses) per optimizer step, over all devices; >= 1.
    Divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: Count = 8
    """Responses per device and forward/backward pass, >= 1. Changes memory and speed, never the update."""
    use_dynamic_bsz: bool = False
    """Micro-batches of equal work, at most ppo_max_token_len_per_gpu tokens, instead of so many responses."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Tokens per device and forward/backward pass, >= 1: with model.use_remove_padding those of the sequences, without
    it padding counts too. A longer sequence goes alone."""
    ppo_epochs: Count = 1
    """Passes over the batch of a step, >= 1."""
    shuffle: bool = False
    """Deal the batch into mini-batches in a new seeded order in each epoch."""
    clip_ratio: NotNegative = 0.2
    """Clip range of the probability ratio, >= 0, unless low and high are given."""
    clip_ratio_low: NotNegative | None = None
    """Lower clip range, >= 0: ratios below 1 - clip_ratio_low are clipped. null: clip_ratio."""
    clip_ratio_high: NotNegative | None = None
    """Upper clip range, >= 0: ratios above 1 + clip_ratio_high are clipped. null: clip_ratio."""
    clip_ratio_c: Annotated[float, Range(1, open_low=True)] = 3.0
    """Dual clip, > 1: bound of ratio * |advantage| where the advantage is negative."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    tis_imp_ratio_cap: Annotated[float, Range(0, open_low=True, also=-1)] = -1
    """Truncated importance sampling, > 0, or -1: off. Weighs a token by its probability under the trainer's model over
    that under the rollout engine's, at most this: for engines whose numbers differ from the trainer's."""
    loss_agg_mode: LossAggMode | None = None
    """How token losses become one number, over the global mini-batch. null: the policy loss's own way, which is
    seq-mean-token-mean for gspo and token-mean for the others."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus, >= 0."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss (GRPO's way)."""
    kl_loss_coef: NotNegative = 0.001
    """Weight of the KL loss, >= 0."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of the KL loss. k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    grad_clip: Positive = 1.0
    """Largest global gradient norm, > 0."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of the actor."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """Where the actor is while others work."""


@dataclass(frozen=True)
class ValSamplingConfig:
    """How validation samples."""

    n: Count = 1
    """Responses per prompt, >= 1."""
    do_sample: bool = False
    """False is greedy decoding; temperature, top_p and top_k then have no part."""
    temperature: Temperature = 1.0
    """Sampling temperature, >= 0.01; do_sample=False is greedy."""
    top_p: Probability = 1.0
    """Nucleus: smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: CountOrAll = -1
    """Sample among the k most likely tokens, >= 1, or -1: no limit."""


@dataclass(frozen=True)
class EngineKwargsConfig:
    """Arguments of a rollout engine beyond those that have a key."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's LLM, such as {dtype: bfloat16}."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled."""

    name: str = "native"
    """Rollout engine: native (the embedded one), vllm, or hf (transformers.generate)."""
    n: Count = 1
    """Responses per prompt, >= 1. Group estimators such as grpo need at least 2."""
    do_sample: bool = True
    """False is greedy decoding in training: for debugging."""
    temperature: Temperature = 1.0
    """Sampling temperature, >= 0.01. Log-probs are of the distribution at this temperature."""
    top_p: Probability = 1.0
    """Nucleus: smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: CountOrAll = -1
    """Sample among the k most likely tokens, >= 1, or -1: no limit."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token until data.max_response_length: for benchmarks."""
    max_num_seqs: Count = 256
    """Responses decoded at the same time on a device, >= 1."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Numbers of the forward pass. null: what the actor computes in."""
    tensor_model_parallel_size: Count = 1
    """vllm: devices that share one engine, each with a part of every layer, >= 1. Divides the devices that generate on
    a node, and the model's attention heads."""
    gpu_memory_utilization: Annotated[Probability, OnlyWith.VLLM] = 0.5
    """vllm: share of a device's memory for weights and cache, in (0, 1]. On a CPU the cache takes what max_num_seqs
    full-length responses need, at most this share of the free memory."""
    max_num_batched_tokens: Annotated[Count, OnlyWith.VLLM] = 8192
    """vllm: tokens per forward pass, >= 1."""
    enable_chunked_prefill: Annotated[bool, OnlyWith.VLLM] = True
    """vllm: divide long prompts between forward passes."""
    enforce_eager: Annotated[bool, OnlyWith.VLLM] = True
    """vllm: False compiles the model, and records CUDA graphs, at the start."""
    free_cache_engine: Annotated[bool, OnlyWith.VLLM] = True
    """vllm: give its memory back while the actor trains. Has no effect on a CPU."""
    load_format: Annotated[str, OnlyWith.VLLM] = "auto"
    """vllm: auto reads the model's weights at the start; dummy waits for the actor's."""
    engine_kwargs: Annotated[EngineKwargsConfig, OnlyWith.VLLM] = field(default_factory=EngineKwargsConfig)
    """Arguments that go to the engine as they are."""
    trust_log_probs: bool = False
    """Take the engine's log-probs for those of the policy before its update: saves a forward pass of the actor, and
    the mismatch is not measured. For engines that compute in the actor's numbers, as native does."""
    log_prob_micro_batch_size_per_gpu: Count = 16
    """Responses per device and forward pass when log-probs are recomputed, >= 1."""
    log_prob_use_dynamic_bsz: bool | None = None
    """At most log_prob_max_token_len_per_gpu tokens instead. null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward pass then, >= 1. null: actor.ppo_max_token_len_per_gpu."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """How validation samples."""


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: Count = 16
    """Responses per device and forward pass, >= 1."""
    log_prob_use_dynamic_bsz: bool | None = None
    """At most log_prob_max_token_len_per_gpu tokens instead. null: actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward pass then, >= 1. null: actor.ppo_max_token_len_per_gpu."""
    fsdp_config: FrozenFsdpConfig = field(default_factory=FrozenFsdpConfig)
    """Where the reference is while others work. With LoRA it is the actor's model, and the actor's setting holds."""


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Actor, rollout and reference: one model in three parts."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The policy's model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Its update."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Its sampling."""
    ref: Annotated[RefConfig, OnlyWith.REFERENCE] = field(default_factory=RefConfig)
    """Its frozen copy."""
