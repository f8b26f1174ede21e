"""Distillation: models that score each token that the policy sampled, and what the policy learns from that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.catalog import KLKind
from paceline.config.field_rules import Count, ModelPath, Positive, Range, WholeNumber
from paceline.config.model_sections import FrozenFsdpConfig


@dataclass(frozen=True)
class TeacherModelConfig:
    """One teacher: a model with the policy's vocabulary."""

    model_path: ModelPath | None = None
    """Folder or hub id of the model, with its tokenizer."""
    key: str | None = None
    """The rows that it teaches: those that have this in the column distillation.teacher_key. null: all, if there is one
    teacher."""


@dataclass(frozen=True)
class DistillationLossConfig:
    """What is minimised: how far the policy is from its teacher, at each token that it sampled."""

    loss_mode: Literal[KLKind, "forward_kl_topk", "forward_kl_topk_tail"] = "k3"
    """Of the sampled token k1, k2, k3, abs (kl, mse and low_var_kl are other names of the first three), estimates of
    the KL of the policy from the teacher; or forward_kl_topk, the KL of the teacher from the policy over the teacher's
    topk likeliest tokens, forward_kl_topk_tail with all other tokens as one more. As a loss k2 has the gradient of the
    KL; k1 is for use_policy_gradient."""
    topk: Count = 32
    """Tokens of forward_kl_topk and forward_kl_topk_tail, >= 1."""
    use_task_rewards: bool = True
    """Learn from rewards too, by the policy loss. False: from the teacher alone; scores are reported where there is a
    rule, and there is no critic."""
    distillation_loss_coef: Positive = 1.0
    """Weight of the distillation loss beside the policy loss, > 0. 1 where it is alone."""
    loss_max_clamp: Positive | None = None
    """The loss of a token is held within plus and minus this, > 0; beyond it has no gradient. null: no limit."""
    log_prob_min_clamp: Annotated[float | None, Range(-1e9, 0, open_high=True)] = None
    """forward_kl_topk: log-probs of both models are at least this, in [-1e+09, 0); a lower one of the policy has no
    gradient. null: no limit."""
    use_policy_gradient: bool = False
    """Take the negative loss of a token for its advantage, in PPO's clipped loss with the actor's clip ranges, in place
    of its own gradient."""


@dataclass(frozen=True)
class DistillationConfig:
    """Teachers and their part in the training."""

    enabled: bool = False
    """Teachers score each sampled token, and the policy learns from that."""
    teacher_models: dict[str, TeacherModelConfig] = field(default_factory=dict)
    """By a name of yours, `{math: {model_path: MODEL, key: openai/gsm8k}}`: each has model_path and, where there are
    several, key."""
    teacher_key: str = "data_source"
    """The column that says which teacher a row has."""
    n_gpus_per_node: WholeNumber = 0
    """Devices per node of teacher_pool, >= 0, beside those of trainer.n_gpus_per_node and trainer.nnodes, on any nodes
    that have them; all teachers are on it. 0: the teachers are on the critic's pool."""
    nnodes: WholeNumber = 0
    """Nodes of that pool, >= 0. 0: one."""
    micro_batch_size_per_gpu: Count | None = None
    """Responses per device and forward pass of a teacher, >= 1. null: as the actor's update, by tokens or 16."""
    forward_max_token_len_per_gpu: Count | None = None
    """Tokens per device and forward pass then, >= 1, counted and chosen as for the actor."""
    fsdp_config: FrozenFsdpConfig = field(default_factory=FrozenFsdpConfig)
    """Where the teachers are while others work."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    """What the policy minimises."""
