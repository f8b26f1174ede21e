"""The sections of a run: prompts, advantages, devices, steps, logging, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.catalog import KLKind
from paceline.config.field_rules import (
    Count,
    CountOrAll,
    LocalPath,
    LocalPaths,
    NotNegative,
    OnlyWith,
    Positive,
    Range,
    Share,
    UserDict,
    WholeNumber,
)


@dataclass(frozen=True)
class CustomDatasetConfig:
    """A dataset class of your own."""

    path: LocalPath | None = None
    """Python file that holds it. null: paceline.data.RLHFDataset reads the files."""
    name: str | None = None
    """Its name. It is called by keyword with those of data_files, tokenizer, config, processor and max_samples that it
    takes."""


@dataclass(frozen=True)
class SamplerConfig:
    """An order of training prompts of your own."""

    class_path: LocalPath | None = None
    """Python file that holds its class. null: data.shuffle and data.seed say the order."""
    class_name: str | None = None
    """The class's name. It is called with data_source (the dataset) and data_config; iterating gives the rows of an
    epoch."""


@dataclass(frozen=True)
class DataConfig:
    """Files of prompts, and how prompts become token ids."""

    train_files: LocalPaths | None = None
    """File or files of training prompts: parquet, JSON lines (.jsonl, .json) or CSV; patterns such as data/*.jsonl."""
    val_files: LocalPaths | None = None
    """The same for validation prompts. null: no validation."""
    train_batch_size: Count = 1024
    """Prompts per training step, >= 1."""
    val_batch_size: Count | None = None
    """Prompts per validation batch, >= 1. null: as many as keep the rollout busy and fit its memory. The results
    are the same."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens, after the chat template; >= 1."""
    max_response_length: Count = 512
    """Longest response in tokens, >= 1."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a longer prompt: stop with an error, or drop its start (left), end (right) or middle."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length, and say how many."""
    prompt_key: str = "prompt"
    """Column of the prompt: a chat (list of {role, content}) or a string."""
    reward_fn_key: str = "data_source"
    """Column that names the scorer of a row."""
    keep_columns: list[str] | None = None
    """Columns to keep for rewards, beside prompt_key, reward_fn_key, data_source, reward_model, extra_info and ability.
    null: all others, but the widest are left out, with a warning, if together they would take more than 64 MiB."""
    apply_chat_template_kwargs: UserDict = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    custom_cls: CustomDatasetConfig = field(default_factory=CustomDatasetConfig)
    """A class of your own that reads the files."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Which prompts an epoch has, in which order."""
    return_raw_chat: bool = False
    """Keep the chat itself in the batch, as column raw_prompt."""
    shuffle: bool = True
    """Draw training prompts in a seeded random order."""
    seed: WholeNumber | None = None
    """Seed of that order, >= 0. null: trainer.seed."""
    drop_last: bool = False
    """Leave out the last batch of a training epoch if it is smaller than train_batch_size. false: train on it."""
    train_max_samples: CountOrAll = -1
    """Use only this many training prompts, >= 1, or -1: all."""
    val_max_samples: CountOrAll = -1
    """Use only this many validation prompts, >= 1, or -1: all."""
    accept_changed_files: bool = False
    """Resume although training files are no longer those that the checkpoint was trained on: the epoch begins again."""
    cache_dir: LocalPath | None = None
    """Folder that keeps the token ids of prompts for later runs. null: the environment variable PACELINE_CACHE, or
    ~/.cache/paceline without it. Empty: no cache."""


@dataclass(frozen=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward moves."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: the coefficient follows target_kl."""
    kl_coef: NotNegative = 0.001
    """Coefficient, or its start value; >= 0."""
    target_kl: Positive = 0.1
    """KL per token (mean over responses) that the adaptive controller aims at, > 0."""
    horizon: Count = 10000
    """Samples over which the adaptive controller reacts, >= 1."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: train only on prompts whose responses differ in score."""

    enable: bool = False
    """Leave out groups whose responses all have the same score, and generate for more prompts until the batch is full.
    Needs rollout.n of 2 or more."""
    metric: str | None = None
    """What is compared: seq_reward (the sum of a response's scores, the overlong penalty included; seq_final_reward is
    the same), score, or a field that the reward function returns, such as acc. null: what the estimator compares, which
    is each of algorithm.gdpo_reward_keys for gdpo and seq_reward for the others."""
    max_num_gen_batches: CountOrAll = 10
    """Batches of prompts that may be generated to fill one, >= 1, or -1: no limit. After them a step has to do with
    what was found."""


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Samples of another distribution than the trained one: of an engine with other numbers, or of older weights.

    r is the probability of a sampled token under the trainer's model over that under the rollout's.
    """

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights: r of each token, or the product over its whole response. null: none."""
    rollout_is_threshold: str | float = 2.0
    """Largest weight, > 0; or two numbers as low_up, such as 0.5_2.0: then weights outside are 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch. With bypass_mode and loss_type=reinforce over each mini-batch,
    for which the update takes one more forward pass."""
    rollout_rs: str | list[str] | None = None
    """Criteria by which tokens (token_k1, token_k2, token_k3) or whole responses (seq_sum_k1, seq_mean_k1, seq_max_k2,
    ...) are rejected, one or several with commas; all must agree to keep one. null: none."""
    rollout_rs_threshold: str | float | None = None
    """One threshold for all criteria, or one for each with commas. For k1 bounds of r as low_up, such as 0.5_2.0, or up
    alone for 1/up_up; for k2 and k3 the largest value that is kept. Wanted by rollout_rs."""
    bypass_mode: bool = False
    """Take the rollout's log-probs for the old ones and save the forward pass that computes them; weights and rejection
    are then those of the policy under update."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Of bypass_mode: ppo_clip clips the ratio to the rollout, which holds the weight already; reinforce weighs
    -advantage * log-prob."""


@dataclass(frozen=True)
class PfPpoConfig:
    """PF-PPO: which responses the updates draw, with replacement, by their rewards."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Weight of a response: pow, |reward| to the power of weight_pow; max_min, 1 for the highest and the lowest reward
    of the batch and 0 for others; max_random, 0.4 for the highest and 0.1 for others. Each plus 1e-8."""
    weight_pow: NotNegative = 2.0
    """The power of pow, >= 0."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """Name of a registered estimator: gae (with a critic); grpo, grpo_passk, gdpo, rloo, opo, gpg,
    reinforce_plus_plus_baseline, optimal_token_baseline, tir_optimal_token_baseline (compare the responses to a
    prompt); reinforce_plus_plus (normalises over the batch); remax (compares with a greedy response). grpo_vectorized
    and rloo_vectorized are other names of grpo and rloo."""
    gamma: Share = 1.0
    """Discount of gae and reinforce_plus_plus, in [0, 1]."""
    lam: Share = 1.0
    """GAE's lambda, in [0, 1]."""
    lam_critic: Share | None = None
    """GAE's lambda for the critic's targets alone, in [0, 1]; VAPO sets 1. null: lam."""
    lam_length_alpha: Positive | None = None
    """GAE's lambda for the advantages by the length of a response, 1 - 1 / (this * its tokens), at least 0; > 0. VAPO
    sets 0.05. lam is then the critic's alone. null: lam."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of grpo and grpo_passk, and the components of gdpo, by the group's standard deviation;
    False is Dr.GRPO's way."""
    gdpo_reward_keys: list[str] | None = None
    """gdpo: the parts of the score, as the reward function's dict names them, such as [accuracy, format]; also score,
    model_score and overlong_penalty."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: their weights, in the same order. null: 1 each."""
    use_pf_ppo: bool = False
    """PF-PPO: the updates train on as many responses, drawn with replacement by pf_ppo. For gae."""
    pf_ppo: PfPpoConfig = field(default_factory=PfPpoConfig)
    """How they are drawn."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference from the token rewards (PPO's way)."""
    kl_penalty: KLKind = "kl"
    """Estimator of that KL. k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its coefficient."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Which groups are trained on."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """What samples of another distribution weigh."""


@dataclass(frozen=True)
class PlacementConfig:
    """Which roles share devices."""

    name: Literal["colocated", "split"] = "colocated"
    """colocated: every role on global_pool. split: actor, rollout and reference on actor_rollout_ref_pool,
    critic and reward model on critic_pool, side by side."""
    critic_devices: Count | None = None
    """The share of critic_pool in split placement, >= 1: devices if nnodes is 1, else nodes. The rest is the
    actor's. null: half."""
    rollout_devices: Count | None = None
    """Devices (nodes, if nnodes is more than 1) of rollout_pool, which does nothing but generate, >= 1; the other pools
    share the rest. null: there is no such pool."""
    rollout_on: list[str] | None = None
    """Pools that generate, such as [actor_rollout_ref_pool,critic_pool]: the actor's and at most one more. They share
    the responses by their devices. null: rollout_pool if there is one, else the actor's."""


@dataclass(frozen=True)
class ScheduleConfig:
    """When responses are sampled, and with which weights."""

    name: Literal["sync", "pipelined", "streaming"] = "sync"
    """sync: the responses of a step are sampled by the weights after the step before. pipelined: by older ones, as
    max_staleness says, so that the rollout of later steps runs beside the training of this one. streaming: prompts of
    several steps are sampled together, and responses go on across updates."""
    max_staleness: WholeNumber = 0
    """So many updates, >= 0, lie at most between the weights that began a response and those that train on it.
    pipelined: the responses of step t are sampled by the weights after step t-1-max_staleness. streaming: the prompts
    of at most max_staleness + 1 steps are under way. 0: the same as sync."""
    on_update: Literal["continue", "restart", "finish"] = "continue"
    """Of streaming, what new weights do to responses under way: continue: they go on with them; restart: they begin
    anew; finish: the weights wait until all have ended."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Of streaming, what becomes of the keys and values of responses that go on. recompute: further log-probs are those
    of the new weights; keep: faster and less exact."""
    on_too_old: Literal["drop", "wait"] = "wait"
    """Of streaming. wait: a step takes prompts in their order, and waits for the slowest. drop: it takes those that
    have ended first; a group that is too old by then is sampled anew."""


@dataclass(frozen=True)
class RunConfig:
    """A run of any kind: its devices, its steps, its folder, its records."""

    nnodes: Annotated[int, Range(1, 10_000)] = 1
    """Nodes, in [1, 10000]."""
    n_gpus_per_node: Annotated[int, Range(1, 1_024)] = 1
    """Devices per node, in [1, 1024]: GPUs, or worker processes on a CPU."""
    device: Literal["cuda", "npu", "cpu"] | None = None
    """What a device is. null: what this machine has."""
    wait_for_nodes_seconds: NotNegative = 0
    """How long a pool that is larger than the cluster waits for nodes to join, >= 0: for clusters that grow on demand,
    which are told what is wanted. 0: an error at once. Set device, which nodes that are not there do not tell."""
    cpus_per_device: NotNegative = 1
    """Ray CPUs that one device takes, >= 0; more than 0 on a CPU, where nothing else counts devices."""
    threads_per_worker: Count | None = None
    """Compute threads of a worker, >= 1. null: the node's cores divided by its workers."""
    balance_batch: bool = True
    """Share responses out so that all devices of a role have about as many tokens."""
    total_epochs: Count = 30
    """Passes over the training data, >= 1, unless total_training_steps says less or more."""
    total_training_steps: Count | None = None
    """Steps in all, >= 1. null: as many as total_epochs give."""
    seed: WholeNumber = 1
    """One seed (>= 0), one result."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: CountOrAll | None = None
    """Validate every so many steps, >= 1, and at the end; or -1: never (but see val_before_train). null: at the end."""
    save_freq: CountOrAll | None = None
    """Save a checkpoint every so many steps, >= 1, and at the end; or -1: never. null: at the end."""
    max_actor_ckpt_to_keep: Count | None = None
    """Newest checkpoints that keep the actor, >= 1; older ones lose it, and can't be resumed from. null: all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the latest checkpoint in the run's folder; disable: start anew;
    resume_path: go on from resume_from_path."""
    resume_from_path: LocalPath | None = None
    """Folder of one checkpoint (.../global_step_N), for resume_mode=resume_path."""
    default_local_dir: LocalPath | None = None
    """The run's folder. null: runs/<project_name>/<experiment_name>."""
    project_name: str = "paceline"
    """Groups runs in trackers."""
    experiment_name: str = "ppo"
    """Names the run in trackers."""
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    """Where metrics go besides metrics.jsonl, which is always written: console, tensorboard, wandb, mlflow, swanlab,
    trackio; one name or a list."""
    prometheus_port: Annotated[int, Range(1, 65_535)] | None = None
    """Serve metrics for Prometheus on this port of the driver's own machine (127.0.0.1), in [1, 65535]. null: no."""
    otlp_endpoint: str | None = None
    """Send each step and call as a span to this OpenTelemetry collector, the address of one that takes OTLP over
    HTTP. Needs paceline[otel]. null: nothing is sent."""
    live_view: bool | None = None
    """Show step, phases, scores and the time left in the terminal that started the run, below its lines. null: if it is
    a terminal."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or infinity in log-probs, values, scores or advantages: stop ends the run; skip leaves the step out, so that
    it updates nothing. In a loss or gradient: skip leaves that optimizer step of that role out. Metrics count both."""
    max_restarts: WholeNumber = 0
    """How often a run starts again by itself from its last checkpoint when a process of it dies, >= 0. Needs
    save_freq."""
    save_on_interrupt: bool = False
    """On Ctrl-C or SIGTERM, finish the step and save a checkpoint before the run ends; again: stop at once."""
    heartbeat_timeout_seconds: Positive = 120.0
    """A worker that was silent for so long counts as dead, > 0."""
    dry_run: bool = False
    """Print the derived batch sizes, the placement and an estimate of the memory, and stop."""


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """The run."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which roles share devices."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """When responses are sampled, and with which weights."""
    overlap: Literal["full", "updates", "none"] = "full"
    """What may run side by side on different pools. full: all that does not need each other, the critic's update behind
    the next rollout too; updates: only the actor's and the critic's; none. The results are the same."""
    critic_warmup: WholeNumber = 0
    """The step from which on the actor trains, >= 0; in those before it the critic learns alone. 0 and 1: the first."""
    max_critic_ckpt_to_keep: Annotated[Count | None, OnlyWith.CRITIC] = None
    """As max_actor_ckpt_to_keep for the critic, >= 1; a checkpoint with neither is deleted."""
    columns_stay_bytes: WholeNumber | None = 32_000
    """A column of a worker's answer that has so many bytes or more stays on the worker's node, >= 0: the driver has a
    reference, and fetches the column when it is read. null: the driver gets and sends every column whole."""
    log_train_samples: WholeNumber = 1
    """Training responses shown with their scores in the log of every step, >= 0."""
    log_val_generations: WholeNumber = 0
    """Validation responses shown in the log and in every tracker but the console at every validation, >= 0."""
    keep_samples: WholeNumber = 4
    """Responses of every step, and of every validation, kept with prompt and score in samples/<step>.jsonl of the run's
    folder, >= 0. Long texts are cut."""
    rollout_data_dir: LocalPath | None = None
    """Folder for all training responses with their scores, a file <step>.jsonl for every step. null: none."""
    validation_data_dir: LocalPath | None = None
    """The same for the responses of every validation."""
    record: str | list[int] = "never"
    """Which steps the flight recorder keeps whole, for `paceline replay`: never, every, a list of steps such as [1,50],
    or on_anomaly: those that are far from the run, with what leads to them."""


@dataclass(frozen=True)
class RayConfig:
    """Ray itself."""

    ray_init: UserDict = field(default_factory=dict)
    """Passed straight to ray.init, such as num_cpus, address or runtime_env."""
    timeline_json_file: LocalPath | None = None
    """Write Ray's own timeline there at the end."""


@dataclass(frozen=True)
class TransferQueueConfig:
    """TransferQueue, a store in processes of its own for columns that stay."""

    enable: bool = False
    """Columns that stay (trainer.columns_stay_bytes) are kept by TransferQueue, and not by Ray's object store. The run
    starts it, or joins one that its Ray has. Needs paceline[transfer-queue]."""
    num_storage_units: Count = 2
    """Its storage processes, >= 1. Each takes one of Ray's CPUs, and so does its controller."""
