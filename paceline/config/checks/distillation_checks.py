"""Teachers: which rows each has, and losses that could not teach or that the rest of a run can't give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.catalog import BACKENDS
from paceline.config import PPOConfig
from paceline.config.derived import learns_from_rewards, top_k
from paceline.config.keys import ACTOR
from paceline.config.path_checks import model_problems, tokenizer_problems

LOSS = "distillation.distillation_loss"
TEACHERS = "distillation.teacher_models"


def check_distillation(cfg: PPOConfig) -> Iterator[str]:
    """Only where distillation is on: a switch that is off may leave its settings in place."""
    if cfg.distillation.enabled:
        yield from _check_teachers(cfg)
        yield from _check_loss(cfg)
        if not learns_from_rewards(cfg):
            yield from _check_unrewarded(cfg)


def _check_teachers(cfg: PPOConfig) -> Iterator[str]:
    section = cfg.distillation
    teachers = section.teacher_models
    if not teachers:
        yield (
            f"{TEACHERS} names no teacher, but distillation.enabled=True; set "
            f"{TEACHERS}.teacher.model_path to a folder of a Hugging Face model or a hub id."
        )
    for name, teacher in teachers.items():
        key = f"{TEACHERS}.{name}.model_path"
        if teacher.model_path is None:
            yield f"{key} is not set; set it to a folder of a Hugging Face model or a hub id."
            continue
        problems = list(model_problems(key, teacher.model_path))
        yield from problems or tokenizer_problems(key, teacher.model_path)
    if len(teachers) > 1:
        for name in (name for name, teacher in teachers.items() if teacher.key is None):
            yield (
                f"{TEACHERS}.{name}.key is not set, and there are {len(teachers)} teachers; set it to what its rows "
                f"have in the column {section.teacher_key} (distillation.teacher_key)."
            )
    for key, count in Counter(teacher.key for teacher in teachers.values() if teacher.key is not None).items():
        if count > 1:
            yield f"{TEACHERS}: {count} teachers have key={key}, and a row has one. Set another, or leave one out."
    if not section.teacher_key:
        yield "distillation.teacher_key is empty; set it to the name of a column."
    if section.nnodes and not section.n_gpus_per_node:
        yield (
            f"distillation.nnodes={section.nnodes} without distillation.n_gpus_per_node: the teachers have no pool of "
            "their own. Set both, or leave nnodes 0."
        )


def _check_loss(cfg: PPOConfig) -> Iterator[str]:
    loss = cfg.distillation.distillation_loss
    chosen = f"{LOSS}.loss_mode={loss.loss_mode}"
    by_top_k = top_k(cfg) is not None
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        yield (
            f"{chosen}: as a loss, its gradient does not depend on the teacher, and is 0 on the mean. Set "
            f"{LOSS}.use_policy_gradient=True, or loss_mode=k2."
        )
    if by_top_k and loss.use_policy_gradient:
        yield (
            f"{chosen} with {LOSS}.use_policy_gradient=True: it is the same whichever token was sampled, so as an "
            f"advantage it teaches nothing. Set {LOSS}.use_policy_gradient=False, or loss_mode=k1."
        )
    if loss.log_prob_min_clamp is not None and not by_top_k:
        yield f"{LOSS}.log_prob_min_clamp is for loss_mode=forward_kl_topk, and {chosen}. Leave it null."
    actor, strategy = cfg.actor_rollout_ref.actor, str(cfg.actor_rollout_ref.actor.strategy)
    backend = BACKENDS.get(strategy)
    if by_top_k and backend is not None and not backend.several_tokens:
        yield (
            f"{chosen} with {ACTOR}.strategy={strategy}, which gives the log-prob of the sampled token alone. Set "
            f"{ACTOR}.strategy=fsdp2, or {LOSS}.loss_mode=k2."
        )
    if by_top_k and actor.ulysses_sequence_parallel_size > 1:
        yield (
            f"{chosen} with {ACTOR}.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size}: devices "
            f"that share sequences give the log-prob of the sampled token alone. Set it to 1, or {LOSS}.loss_mode=k2."
        )
    correction = cfg.algorithm.rollout_correction
    if loss.use_policy_gradient and correction.bypass_mode and correction.loss_type == "reinforce":
        yield (
            f"{LOSS}.use_policy_gradient=True with algorithm.rollout_correction.loss_type=reinforce: the clipped ratio "
            "of the first holds the weight of the second already. Set loss_type=ppo_clip."
        )


def _check_unrewarded(cfg: PPOConfig) -> Iterator[str]:
    """What has no part where no reward trains."""
    algorithm, alone = cfg.algorithm, f"{LOSS}.use_task_rewards=False"
    switches = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "reward_model.enable": cfg.reward_model.enable,
    }
    for key, is_on in switches.items():
        if is_on:
            yield f"{key}=True with {alone}: no reward trains, so it would have no effect. Set it to False."
    if (coefficient := cfg.distillation.distillation_loss.distillation_loss_coef) != 1:
        yield f"{LOSS}.distillation_loss_coef={coefficient} with {alone}: nothing is weighed against it. Set it to 1."
    if (warmup := cfg.trainer.critic_warmup) > 0:
        yield f"trainer.critic_warmup={warmup} with {alone}: there is no critic. Set it to 0."
