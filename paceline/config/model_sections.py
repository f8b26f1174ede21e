"""The sections of the models: the policy (its model, its update, its rollout, the frozen reference) and the critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.catalog import KLLossKind, LossAggMode
from paceline.config.agents import AgentConfig, MultiTurnConfig
from paceline.config.field_rules import (
    Count,
    CountOrAll,
    Each,
    ModelPath,
    ModuleOrFile,
    NotNegative,
    OnlyWith,
    Positive,
    Probability,
    Range,
    Share,
    Temperature,
    UserDict,
    WholeNumber,
)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = 1e-6
    """Peak learning rate, >= 0. 0 trains nothing."""
    betas: Annotated[tuple[float, float], Each(Range(0, 1, open_high=True))] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: Positive = 1e-8
    """Added to the denominator of AdamW, > 0."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, >= 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: constant, or linear or cosine down to lr * min_lr_ratio."""
    min_lr_ratio: Share = 0.0
    """Where linear and cosine end, as a share of lr, in [0, 1]."""
    lr_warmup_steps: Annotated[int, Range(0, also=-1)] = -1
    """Optimizer steps of linear warm-up, >= 0, or -1: lr_warmup_steps_ratio instead."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all optimizer steps, in [0, 1]."""


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face model: a folder or a hub id."""

    path: ModelPath | None = None
    """Folder or hub id. For the critic, null takes the actor's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""
    use_remove_padding: bool | None = None
    """Pack the sequences of a micro-batch into one row without padding. Changes memory and speed, never the result.
    null: where the model, which is tried at the start, keeps packed sequences apart."""
    use_torch_compile: bool = False
    """Compile the layers of the model, with strategy=local: the first passes take a minute or more. Changes results by
    rounding alone. Wants a C++ compiler on a CPU, Triton on a GPU."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of forward and backward passes; weights and optimizer stay float32."""
    max_position_embeddings: Count | None = None
    """Longest sequence of a model with rotary embeddings in place of what its config.json says, >= 1. null: that."""


@dataclass(frozen=True)
class TrainedModelConfig(ModelConfig):
    """A model that is trained."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class FrozenFsdpConfig:
    """Where a model that is not trained is while others work."""

    param_offload: bool = False
    """Keep the weights in main memory between calls. On a CPU they are there anyway."""


@dataclass(frozen=True)
class FsdpConfig(FrozenFsdpConfig):
    """Where a model and its optimizer are while others work, with every training backend but torchtitan."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in main memory between updates. On a CPU it is there anyway."""


@dataclass(frozen=True)
class TensorParallelConfig:
    """How a backend divides a model, where that is its strategy."""

    tensor_model_parallel_size: Count = 1
    """Devices that hold one model together, each a part of every layer, >= 1. Divides the devices of the pool."""


@dataclass(frozen=True)
class MegatronConfig(TensorParallelConfig):
    """How Megatron divides a model, where that is the strategy."""

    pipeline_model_parallel_size: Count = 1
    """Devices that hold the layers of one model one behind the other, >= 1. Divides the layers and the devices of the
    pool. Not yet with tensor_model_parallel_size. Saves memory alone: one computes at a time."""


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
    """Name of a registered policy loss: vanilla (PPO's clipped surrogate, dual clip), gspo (one ratio per response),
    cispo (a clipped weight), geo_mean (a geometric mean of ratios), sapo (a smooth gate), dppo_tv, dppo_kl (mask by
    divergence), clip_cov, kl_cov (hold back tokens of high covariance), gpg (REINFORCE), dro (a quadratic pull), or
    bypass_mode (algorithm.rollout_correction)."""
    clip_cov_ratio: Probability = 2e-4
    """clip_cov: share of a mini-batch's tokens that lose their gradient, at least one, in (0, 1]."""
    clip_cov_lb: NotNegative = 1.0
    """clip_cov: they are drawn from tokens whose covariance is above this, >= 0."""
    clip_cov_ub: Positive = 5.0
    """clip_cov: and below this, > 0."""
    kl_cov_ratio: Probability = 2e-4
    """kl_cov: share of a mini-batch's tokens that are penalised, at least one, in (0, 1]."""
    ppo_kl_coef: NotNegative = 0.1
    """kl_cov: weight of their penalty, >= 0."""
    dro_beta: Positive | None = None
    """dro: strength of the pull to the old policy, > 0. Wanted by dro."""


@dataclass(frozen=True)
class ActorConfig:
    """The update of the policy."""

    strategy: str | None = None
    """Training backend: local (one process, no collectives), fsdp or fsdp2 (any number of devices), or one of an
    optional package: torchtitan, veomni, megatron. null: local on one device, fsdp2 on more."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Where strategy=megatron."""
    torchtitan: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    ulysses_sequence_parallel_size: Count = 1
    """fsdp2: devices that share each sequence, >= 1: each has a part of its tokens and, in the attention, a part of the
    heads. For sequences that one device has no memory for. Divides the devices of the pool and the attention heads.
    Tokens per device count its part. The reference has the same."""
    ppo_mini_batch_size: Count = 256
    """Prompts (times rollout.n responses) per optimizer step, over all devices; >= 1.
    Divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward/backward pass, >= 1. Changes memory and speed, never the update. null: by
    tokens; 8 if use_dynamic_bsz=False."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches of equal work, at most ppo_max_token_len_per_gpu tokens, instead of so many responses. null: unless
    ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward/backward pass, >= 1: with packing those of the sequences, without it padding counts
    too. A longer sequence goes alone. null: by the lengths of the data, the model's size and the memory;
    trainer.dry_run=True shows it."""
    ppo_epochs: Count = 1
    """Passes over the batch of a step, >= 1."""
    shuffle: bool = False
    """Deal the batch into mini-batches in a new seeded order in each epoch."""
    clip_ratio: NotNegative = 0.2
    """Clip range of the probability ratio, >= 0, unless low and high are given. Of dppo_tv and dppo_kl: how far a
    probability may move; of geo_mean: a range of log ratios."""
    clip_ratio_low: NotNegative | None = None
    """Lower clip range, >= 0: ratios below 1 - clip_ratio_low are clipped. null: clip_ratio."""
    clip_ratio_high: NotNegative | None = None
    """Upper clip range, >= 0: ratios above 1 + clip_ratio_high are clipped. null: clip_ratio."""
    clip_ratio_c: Annotated[float, Range(1, open_low=True)] | None = None
    """Dual clip, > 1: bound of ratio * |advantage| where the advantage is negative; of dppo_tv and dppo_kl the largest
    weight. null: 3, and 20 for dppo_tv and dppo_kl."""
    tau_pos: Positive = 1.0
    """sapo: how soon its gate closes where the advantage is positive, > 0."""
    tau_neg: Positive = 1.05
    """sapo: the same where the advantage is not, > 0."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    tis_imp_ratio_cap: Annotated[float, Range(0, open_low=True, also=-1)] = -1
    """Truncated importance sampling, > 0, or -1: off. Another way to write
    algorithm.rollout_correction.rollout_is=token with this rollout_is_threshold."""
    loss_agg_mode: LossAggMode | None = None
    """How token losses become one number, over the global mini-batch. null: the policy loss's own way, which is
    seq-mean-token-mean for gspo, sapo and geo_mean, and token-mean for the others."""
    loss_scale_factor: Positive | None = None
    """Divisor of seq-mean-token-sum-norm beside the number of sequences, > 0. null: data.max_response_length."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus, >= 0."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss (GRPO's way)."""
    kl_loss_coef: NotNegative = 0.001
    """Weight of the KL loss, >= 0."""
    kl_loss_type: KLLossKind = "low_var_kl"
    """Estimator of the KL loss. k1, k2 and k3 are other names of kl, mse and low_var_kl. With + at the end, as k3+, it
    has the gradient of k2, which on policy is that of the KL."""
    unbiased_kl_loss: bool = False
    """Multiply the KL loss of each token by its probability ratio, and take the gradient of k2 whatever kl_loss_type
    is: its mean is the gradient of the KL off policy, too."""
    calculate_sum_pi_squared: bool = False
    """Compute the squared probabilities of all tokens, summed, at each token, and report their mean as
    actor/sum_pi_squared. Estimators that need it turn it on by themselves."""
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

    vllm: UserDict = field(default_factory=dict)
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
    weight_transfer: Literal["object_store", "broadcast"] = "object_store"
    """How new weights come to a rollout on other devices than the actor's. object_store: Ray's, where the actor does
    not wait for the rollout; broadcast: a collective, gloo or nccl, where they meet and neither holds more than two
    buckets of 256 MiB."""
    trust_log_probs: bool | None = None
    """Take the engine's log-probs for those of the policy before its update, which saves a forward pass of the actor.
    Some rows of every step are computed all the same, and the difference is reported. null: where the engine is native
    and computes in the actor's dtype, without LoRA; if the difference is more than rounding, a step computes all rows.
    True: of any engine, whatever the difference. False: every step computes all rows."""
    on_weight_mismatch: Literal["stop", "resend", "warn"] = "stop"
    """New weights in an engine are compared with the actor's. If they differ: stop ends the run; resend sends them
    again, and stops if that does not help; warn goes on."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward pass when log-probs are recomputed, >= 1. null: as the actor's update, by tokens
    or 16."""
    log_prob_use_dynamic_bsz: bool | None = None
    """At most log_prob_max_token_len_per_gpu tokens instead. null: as the actor's update, unless
    log_prob_micro_batch_size_per_gpu is set."""
    log_prob_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward pass then, >= 1. null: actor.ppo_max_token_len_per_gpu."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """How validation samples."""
    multi_turn: Annotated[MultiTurnConfig, OnlyWith.AGENTS] = field(default_factory=MultiTurnConfig)
    """Conversations of several turns."""
    agent: Annotated[AgentConfig, OnlyWith.AGENTS] = field(default_factory=AgentConfig)
    """Who has them."""


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward pass, >= 1. null: as the actor's update, by tokens or 16."""
    log_prob_use_dynamic_bsz: bool | None = None
    """At most log_prob_max_token_len_per_gpu tokens instead. null: as the actor's update, unless
    log_prob_micro_batch_size_per_gpu is set."""
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
    nccl_timeout: Count | None = None
    """Seconds that the workers of a role may wait for each other in one collective, >= 1. null: PyTorch's own limit."""


@dataclass(frozen=True)
class CriticModelConfig(TrainedModelConfig):
    """The backbone under the value head."""

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """Where it is while others work."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model and its update. Used where algorithm.adv_estimator is gae."""

    strategy: str | None = None
    """Training backend, as the actor's; need not be the same."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Where strategy=megatron."""
    torchtitan: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    ulysses_sequence_parallel_size: Count = 1
    """As the actor's, >= 1; need not be the same."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The backbone under the value head; path null takes the actor's."""
    ppo_mini_batch_size: Count | None = None
    """Prompts (times rollout.n responses) per optimizer step, over all devices; >= 1. null: the actor's."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward/backward pass, >= 1. null: by tokens, or 8."""
    forward_micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward pass when values are computed, >= 1. null: as the update, by tokens or 16."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches of equal work, by tokens instead of responses, in the update and when values are computed. null: as
    the actor's update, unless responses are set."""
    ppo_max_token_len_per_gpu: Count | None = None
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
