"""What a response is worth: rules, a function of the user's, a reward model, and how they are weighed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.config.field_rules import (
    Count,
    LocalPath,
    ModelPath,
    NotNegative,
    OnlyWith,
    Positive,
    Range,
    UserDict,
    WholeNumber,
)
from paceline.config.model_sections import FrozenFsdpConfig, MegatronConfig, ModelConfig, TensorParallelConfig
from paceline.errors import ConfigError

DEFAULT_SOURCE = "default"
"""The key of reward_model.weights for all sources with a rule that it does not name."""


@dataclass(frozen=True)
class CustomRewardConfig:
    """A reward function of your own."""

    path: LocalPath | None = None
    """Python file that holds it. null: the rules by data_source."""
    name: str = "compute_score"
    """Its name: fn(data_source, solution_str, ground_truth, extra_info) -> float or dict with `score`, or, for a whole
    batch, fn(data_sources, solution_strs, ground_truths, extra_infos) -> a list of them. Both may be async."""
    reward_kwargs: UserDict = field(default_factory=dict)
    """Further keyword arguments of the function."""


@dataclass(frozen=True)
class SourceWeights:
    """How the two scores of a row are added: rule * rule score + model * model score."""

    rule: float = 1.0
    """Weight of the rule's score, >= 0; nothing where a row has no rule."""
    model: float = 0.0
    """Weight of the model's score, >= 0."""


@dataclass(frozen=True)
class SandboxConfig:
    """Where programs in responses run, for the code sources."""

    url: str | None = None
    """Address of a remote service that speaks SandboxFusion's /run_code. null: the environment variable
    PACELINE_SANDBOX_URL, or else jails on the machine that grades."""
    mode: Literal["fraction", "all"] = "fraction"
    """fraction: the score is the share of passed tests; all: 1 if all pass, else 0."""
    max_concurrent: Count | None = None
    """Programs that each reward process runs at one time, >= 1. null: 16 on a service; here as many as cores and
    memory allow."""
    timeout_seconds: Positive = 30.0
    """Of one request to the service, > 0; at least wall_seconds."""
    retries: WholeNumber = 3
    """Further attempts after a failed request to the service, >= 0."""
    wall_seconds: Annotated[float, Range(0.1)] = 10.0
    """Time from start to end of a program, >= 0.1."""
    cpu_seconds: Count = 5
    """CPU time of each process of a program, >= 1. On a service, the service's own limit holds."""
    memory_limit_mb: Annotated[int, Range(64)] = 512
    """Memory of a program, in MiB, >= 64."""


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment: long responses lose up to penalty_factor, before the hard limit cuts them."""

    enable: bool = False
    """Add the penalty to the score of every response, whoever scores it."""
    len: Count = 512
    """Tokens before max_resp_len over which the penalty grows from 0 to penalty_factor, >= 1."""
    penalty_factor: NotNegative = 1.0
    """The penalty at max_resp_len tokens, >= 0."""
    log: bool = False
    """Report reward/overlong_rate and reward/overlong_penalty."""


@dataclass(frozen=True)
class RewardKwargsConfig:
    """What is added to scores."""

    overlong_buffer_cfg: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """The penalty of long responses."""
    max_resp_len: Count | None = None
    """Tokens at which the overlong penalty is complete, >= 1. null: data.max_response_length."""


@dataclass(frozen=True)
class RewardModelModelConfig(ModelConfig):
    """The reward model: a Hugging Face model with one score."""

    tokenizer_path: ModelPath | None = None
    """Folder or hub id of its tokenizer. null: beside the model."""
    input_tokenizer: ModelPath | None = None
    """Folder or hub id of the tokenizer that made the prompts and responses. null: the actor's."""
    fsdp_config: FrozenFsdpConfig = field(default_factory=FrozenFsdpConfig)
    """Where it is while others work."""


@dataclass(frozen=True)
class RewardModelConfig:
    """How responses are scored: a reward model, and the processes that grade by rule."""

    enable: bool = False
    """Score with a reward model, where reward_model.weights and the data say so."""
    enable_resource_pool: Annotated[bool, OnlyWith.REWARD_MODEL] = False
    """The model has devices of its own, reward_model_pool, beside those of trainer.n_gpus_per_node and trainer.nnodes,
    on any nodes that have them. Else it is on the critic's pool."""
    n_gpus_per_node: Annotated[WholeNumber, OnlyWith.REWARD_MODEL] = 0
    """Devices per node of that pool, >= 0. 0: as many as trainer.n_gpus_per_node."""
    nnodes: Annotated[WholeNumber, OnlyWith.REWARD_MODEL] = 0
    """Nodes of that pool, >= 0. 0: one."""
    strategy: Annotated[str | None, OnlyWith.REWARD_MODEL] = None
    """Backend of the model, as the actor's; need not be the same."""
    megatron: Annotated[MegatronConfig, OnlyWith.REWARD_MODEL] = field(default_factory=MegatronConfig)
    """Where strategy=megatron."""
    torchtitan: Annotated[TensorParallelConfig, OnlyWith.REWARD_MODEL] = field(default_factory=TensorParallelConfig)
    """Where strategy=torchtitan."""
    ulysses_sequence_parallel_size: Annotated[Count, OnlyWith.REWARD_MODEL] = 1
    """As the actor's, >= 1; need not be the same."""
    model: Annotated[RewardModelModelConfig, OnlyWith.REWARD_MODEL] = field(default_factory=RewardModelModelConfig)
    """The model; its path is needed if enable is true."""
    micro_batch_size_per_gpu: Annotated[Count | None, OnlyWith.REWARD_MODEL] = None
    """Responses per device and forward pass, >= 1. null: as the actor's update, by tokens or 16."""
    use_dynamic_bsz: Annotated[bool | None, OnlyWith.REWARD_MODEL] = None
    """Micro-batches of equal work, at most forward_max_token_len_per_gpu tokens, instead of so many responses. null:
    as the actor's update, unless micro_batch_size_per_gpu is set."""
    forward_max_token_len_per_gpu: Annotated[Count | None, OnlyWith.REWARD_MODEL] = None
    """Tokens per device and forward pass then, >= 1, counted and chosen as for the actor."""
    max_length: Annotated[Count | None, OnlyWith.REWARD_MODEL] = None
    """Most tokens of prompt and response together that the model reads, >= 1. null: all of them."""
    num_workers: Count = 1
    """Processes that grade by rule, >= 1."""
    weights: UserDict = field(default_factory=dict)
    """By data_source, `{rule: 1.0, model: 0.2}`: the weights of the rule's and of the model's score, each >= 0. The key
    `default` is for rows with a rule of all other sources; without it they have {rule: 1, model: 0}. A row without a
    rule is scored by the model alone, with weight 1, unless its source is named here."""
    validate: Annotated[bool, OnlyWith.REWARD_MODEL] = True
    """Validation is scored as training is, by the model too. false: by rule alone, without weights; then every
    validation row needs a rule."""
    on_error: Literal["raise", "retry", "zero_and_count"] | None = None
    """When grading fails. raise: stop at once; retry: try again up to max_retries times, then score 0 and count;
    zero_and_count: score 0 and count in reward/grader_errors. null: as zero_and_count, but stop if a whole batch
    fails."""
    max_retries: Count = 3
    """Further attempts with on_error=retry, >= 1."""
    timeout_seconds: Positive | None = 300.0
    """Longest time of one call of your own reward function or scorer, > 0: of a response, or of a batch if it takes
    batches. What takes longer is killed, and has failed. null: no limit; the function then runs in the reward process
    itself, and not in one of its own."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where programs in responses run."""
    reward_kwargs: RewardKwargsConfig = field(default_factory=RewardKwargsConfig)
    """What is added to scores."""


def read_weights(weights: Mapping[str, object]) -> dict[str, SourceWeights]:
    """`reward_model.weights` with a SourceWeights for each source; a ConfigError lists what is wrong."""
    fields = {item.name for item in dataclasses.fields(SourceWeights)}
    read: dict[str, SourceWeights] = {}
    problems: list[str] = []
    for source, value in weights.items():
        if isinstance(value, SourceWeights):
            read[source] = value
        elif not isinstance(value, Mapping) or not value or not set(value) <= fields:
            problems.append(
                f"reward_model.weights of {source!r} is {_shown(value)}; write {{rule: 1.0, model: 0.2}}, or one of "
                "the two."
            )
        elif bad := [name for name in value if not _is_weight(value[name])]:
            shown = ", ".join(f"{name}={value[name]!r}" for name in bad)
            problems.append(f"reward_model.weights of {source!r} has {shown}; set it to a number >= 0.")
        else:
            read[source] = SourceWeights(**{name: float(number) for name, number in value.items()})
    if problems:
        raise ConfigError(problems)
    return read


def _shown(value: object) -> str:
    return str(dict(value)) if isinstance(value, Mapping) else repr(value)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
