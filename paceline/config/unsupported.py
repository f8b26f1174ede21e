"""Keys and choices that people bring from verl and that we don't support yet: each is an error that says what to do.

A key that was accepted and ignored would be a lie about the run.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.text import unknown_choice

_MEGATRON = "is not supported yet: megatron divides models by megatron.tensor_model_parallel_size alone. Leave it out."
_MEGATRON_KEYS = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "param_offload",
    "grad_offload",
    "optimizer_offload",
    "use_distributed_optimizer",
    "use_dist_checkpointing",
    "dist_checkpointing_path",
    "use_mbridge",
    "override_ddp_config",
    "override_transformer_config",
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_MEGATRON_SECTIONS = (_ACTOR, "critic", "reward_model")

_PROFILER = (
    "is not supported: every run writes timeline.json, which `paceline report` draws; ray_kwargs.timeline_json_file "
    "has Ray's own. Leave it out."
)
_PROFILERS = (
    "global_profiler",
    "trainer.profile_steps",
    "trainer.worker_nsight_options",
    "trainer.controller_nsight_options",
    *(f"{section}.profiler" for section in (_ACTOR, _ROLLOUT, _REF, "critic", "reward_model")),
)

UNSUPPORTED_KEYS: dict[str, str] = {
    **{f"{section}.megatron.{key}": _MEGATRON for section in _MEGATRON_SECTIONS for key in _MEGATRON_KEYS},
    f"{_ACTOR}.ulysses_sequence_parallel_size": "is not supported yet: a sequence stays on one device. Leave it out.",
    f"{_ACTOR}.use_torch_compile": "is not supported yet: models run uncompiled. Leave it out.",
    f"{_MODEL}.use_fused_kernels": "is not supported yet. Leave it out.",
    f"{_ROLLOUT}.mode": "is not supported yet: rollouts are synchronous. Leave it out.",
    f"{_REF}.megatron": f"has another place here: the reference has the actor's backend. Set {_ACTOR}.megatron.",
    "actor_rollout_ref.nccl_timeout": "is not supported: set trainer.heartbeat_timeout_seconds, which watches workers.",
    "reward_model.reward_manager": "is not supported yet: there is one manager. Set custom_reward_function.path to a "
    "function for one response or for a batch, async or not, with custom_reward_function.reward_kwargs; for dapo, set "
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.sandbox_fusion": "has another place here: set reward_model.sandbox.url, max_concurrent and "
    "memory_limit_mb.",
    **dict.fromkeys(_PROFILERS, _PROFILER),
    "data.image_key": "is not supported yet: prompts are text. Leave it out.",
    "data.trust_remote_code": f"has another place here: set {_MODEL}.trust_remote_code.",
}
"""A key, or a section with all that is below it, to what follows its name in the message."""

_USE_VLLM = "is not supported yet; use native or vllm."
_USE_TENSORBOARD = "is not supported yet; use tensorboard or wandb, and metrics.jsonl is always written."
_USE_GRPO = "is not supported yet; use grpo or rloo."
_USE_VANILLA = "is not supported yet; use vanilla, gspo or cispo."

UNSUPPORTED_CHOICES: dict[str, dict[str, str]] = {
    "trainer.device": {"gpu": "is not known; GPUs are cuda."},
    f"{_ROLLOUT}.name": {"sglang": _USE_VLLM},
    "trainer.logger": dict.fromkeys(("mlflow", "swanlab", "comet", "clearml"), _USE_TENSORBOARD),
    "algorithm.adv_estimator": dict.fromkeys(("opo", "gpg", "grpo_passk"), _USE_GRPO),
    f"{_ACTOR}.policy_loss.loss_mode": dict.fromkeys(("gpg", "clip_cov", "kl_cov", "geo_mean"), _USE_VANILLA),
}
"""A key to the values that people know, each with what follows `key=value` in the message."""


def refused_choice(key: str, asked: str, known: Iterable[str]) -> str:
    """What to say of a value that is none of the known ones: that it is not supported yet, or which is the nearest."""
    unsupported = UNSUPPORTED_CHOICES.get(key, {})
    return f"{key}={asked} {unsupported[asked]}" if asked in unsupported else unknown_choice(key, asked, known)
