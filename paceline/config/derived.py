"""What follows from the sections: which roles a run has, sections with what they leave open (null) filled in, and how
devices are divided into pools. A pool is a list of devices per node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.catalog import ESTIMATORS, EstimatorEntry
from paceline.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    AnyRunConfig,
    CriticConfig,
    ModelConfig,
    PlacementConfig,
    PPOConfig,
    RewardModelConfig,
    SupervisedConfig,
    TrainerConfig,
)
from paceline.config.run_sections import RunConfig
from paceline.config.supervised import TrainingEngineConfig
from paceline.errors import ConfigError
from paceline.run_folder import default_run_dir

GLOBAL_POOL = "global_pool"
ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"
ROLLOUT_POOL = "rollout_pool"
REWARD_MODEL_POOL = "reward_model_pool"
TEACHER_POOL = "teacher_pool"
UPDATE_ROWS, FORWARD_ROWS = 8, 16
"""Responses of a micro-batch with gradients, and of one without, where micro-batches go by rows and none are set."""
TOKEN_BUDGET = 4096
"""Tokens of a micro-batch in a worker that has no driver to choose them."""

Pools = dict[str, list[int]]
SupervisedRoot = TypeVar("SupervisedRoot", bound=SupervisedConfig)
Root = TypeVar("Root", bound=AnyRunConfig)


def learns_from_rewards(config: PPOConfig) -> bool:
    """Whether scores become advantages, and the policy loss trains; not where a teacher alone does."""
    distillation = config.distillation
    return not distillation.enabled or distillation.distillation_loss.use_task_rewards


def estimator_in_use(config: PPOConfig) -> EstimatorEntry | None:
    """What the estimator needs; None for one that nobody knows, and where nothing is estimated."""
    return ESTIMATORS.get(config.algorithm.adv_estimator) if learns_from_rewards(config) else None


def uses_critic(config: PPOConfig) -> bool:
    """Whether the estimator reads values; one that nobody knows has no critic."""
    estimator = estimator_in_use(config)
    return estimator is not None and estimator.needs_critic


def top_k(config: PPOConfig) -> int | None:
    """How many of a teacher's likeliest tokens the distillation compares; None if it compares the sampled one."""
    loss = config.distillation.distillation_loss
    return loss.topk if loss.loss_mode.startswith("forward_kl_topk") else None


def uses_reference(config: PPOConfig) -> bool:
    """Whether a KL term needs the reference policy."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def uses_agents(config: PPOConfig) -> bool:
    """Whether agent processes have conversations with the rollout, instead of one response to each prompt."""
    rollout = config.actor_rollout_ref.rollout
    agent = rollout.agent
    has_own = agent.default_agent_loop != "single_turn_agent" or agent.agent_loop_config_path is not None
    return rollout.multi_turn.enable or has_own


def uses_sum_pi_squared(config: PPOConfig) -> bool:
    """Whether the sum of squared probabilities is computed with the old log-probs, asked for or needed."""
    estimator = estimator_in_use(config)
    is_needed = estimator is not None and estimator.needs_sum_pi_squared
    return is_needed or config.actor_rollout_ref.actor.calculate_sum_pi_squared


def component_weights(algorithm: AlgorithmConfig) -> dict[str, float]:
    """The parts of a score that the estimator reads, with their weights; none for most estimators."""
    estimator = ESTIMATORS.get(algorithm.adv_estimator)
    if estimator is None or not estimator.needs_components:
        return {}
    names = algorithm.gdpo_reward_keys or []
    return dict(zip(names, algorithm.gdpo_reward_weights or [1.0] * len(names), strict=True))


def policy_config(config: PPOConfig) -> ActorRolloutRefConfig:
    """The policy's section. Where weights change between two steps of decoding, vLLM begins none ahead of its time."""
    policy = config.actor_rollout_ref
    if config.trainer.schedule.name != "streaming" or policy.rollout.name != "vllm":
        return policy
    kwargs = policy.rollout.engine_kwargs
    kwargs = replace(kwargs, vllm={"async_scheduling": False, **kwargs.vllm})
    return replace(policy, rollout=replace(policy.rollout, engine_kwargs=kwargs))


def critic_config(config: PPOConfig) -> CriticConfig:
    """The critic's section, completed from the actor's."""
    critic, policy = config.critic, config.actor_rollout_ref
    return replace(
        critic,
        ppo_mini_batch_size=critic.ppo_mini_batch_size or policy.actor.ppo_mini_batch_size,
        ppo_epochs=critic.ppo_epochs or policy.actor.ppo_epochs,
        use_dynamic_bsz=by_tokens(
            critic.use_dynamic_bsz,
            critic.ppo_micro_batch_size_per_gpu or critic.forward_micro_batch_size_per_gpu,
            otherwise=actor_goes_by_tokens(policy.actor),
        ),
        model=replace(critic.model, path=critic.model.path or policy.model.path),
    )


def update_sizes(section: ActorConfig | CriticConfig) -> tuple[int, int]:
    """Prompts in a mini-batch, and passes over a batch; a critic's section must come from `critic_config`."""
    assert section.ppo_mini_batch_size is not None
    assert section.ppo_epochs is not None
    return section.ppo_mini_batch_size, section.ppo_epochs


def reward_model_config(config: PPOConfig) -> RewardModelConfig:
    """The reward model's section, with the policy's tokenizer as that of its inputs unless another is named."""
    section, policy = config.reward_model, config.actor_rollout_ref
    tokenizer = section.model.input_tokenizer or policy.model.tokenizer_path or policy.model.path
    return replace(
        section,
        use_dynamic_bsz=by_tokens(
            section.use_dynamic_bsz, section.micro_batch_size_per_gpu, otherwise=actor_goes_by_tokens(policy.actor)
        ),
        model=replace(section.model, input_tokenizer=tokenizer),
    )


def teacher_models(config: PPOConfig) -> dict[str, ModelConfig]:
    """The teachers' models by their names, computed as the policy's is; none where distillation is off."""
    policy, section = config.actor_rollout_ref.model, config.distillation
    return {
        name: ModelConfig(
            path=teacher.model_path,
            trust_remote_code=policy.trust_remote_code,
            use_remove_padding=policy.use_remove_padding,
            compute_dtype=policy.compute_dtype,
        )
        for name, teacher in (section.teacher_models.items() if section.enabled else ())
    }


def by_tokens(asked: bool | None, rows: int | None, *, otherwise: bool) -> bool:
    """Whether micro-batches are of so many tokens: as asked, else not if their rows are set, else as `otherwise`."""
    if asked is not None:
        return asked
    return otherwise if rows is None else False


def actor_goes_by_tokens(actor: ActorConfig) -> bool:
    """Whether the micro-batches of the actor's update are of so many tokens; other passes follow it."""
    return by_tokens(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, otherwise=True)


def backend_for(strategy: str | None, num_devices: int) -> str:
    """The backend of a role on so many devices: what its section names, else the one that has least to do there."""
    return strategy or ("local" if num_devices == 1 else "fsdp2")


def reward_model_pool(config: PPOConfig) -> list[int]:
    """Devices per node of the reward model's own pool; none if it has no such pool."""
    section = config.reward_model
    if not (section.enable and section.enable_resource_pool):
        return []
    return [section.n_gpus_per_node or config.trainer.n_gpus_per_node] * (section.nnodes or 1)


def teacher_pool(config: PPOConfig) -> list[int]:
    """Devices per node of the teachers' own pool; none if they have no such pool."""
    section = config.distillation
    return [section.n_gpus_per_node] * (section.nnodes or 1) if section.enabled and section.n_gpus_per_node else []


def pools_apart(config: PPOConfig) -> Pools:
    """Pools beside the trainer's devices, on any nodes that have room."""
    own = {REWARD_MODEL_POOL: reward_model_pool(config), TEACHER_POOL: teacher_pool(config)}
    return {name: devices for name, devices in own.items() if devices}


def run_pools(config: PPOConfig) -> Pools:
    """All pools of a placement: those that share the trainer's devices, and those apart."""
    return device_pools(config.trainer) | pools_apart(config)


def role_pools(trainer: TrainerConfig) -> tuple[list[int], list[int]]:
    """Devices per node of the actor's pool, and of that of critic and reward model."""
    pools = device_pools(trainer)
    return next(iter(pools.values())), pools.get(CRITIC_POOL, next(iter(pools.values())))


def with_backends(config: PPOConfig) -> PPOConfig:
    """The same with a backend for every role: what a section leaves open follows from the devices of its pool."""
    try:
        shares, per_share = pool_shares(config.trainer), config.trainer.n_gpus_per_node
        first = next(iter(shares.values()))
        counted = (first, shares.get(CRITIC_POOL, first))
        actor_devices, critic_devices = (share * per_share if config.trainer.nnodes > 1 else share for share in counted)
    except ConfigError:  # a placement that can't be; any number of devices will do to check the rest
        actor_devices = critic_devices = 2
    policy, critic, scorer = config.actor_rollout_ref, config.critic, config.reward_model
    scorer_devices = sum(reward_model_pool(config)) or critic_devices
    actor = replace(policy.actor, strategy=backend_for(policy.actor.strategy, actor_devices))
    return replace(
        config,
        actor_rollout_ref=replace(policy, actor=actor),
        critic=replace(critic, strategy=backend_for(critic.strategy, critic_devices)),
        reward_model=replace(scorer, strategy=backend_for(scorer.strategy, scorer_devices)),
    )


def run_dir_of(trainer: RunConfig) -> Path:
    """The run's folder: the one that is named, else by project and experiment where the run is started."""
    named = trainer.default_local_dir or default_run_dir(trainer.project_name, trainer.experiment_name)
    return Path(named).expanduser()


def with_trainer_keys(config: Root, **keys: object) -> Root:
    """The same with other values of keys of its trainer."""
    trainer: Any = replace(config.trainer, **keys)  # type: ignore[arg-type]  # the names are known when it runs
    return replace(config, trainer=trainer)


def num_devices(config: AnyRunConfig) -> int:
    """Of the whole run."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def with_backend(config: SupervisedRoot) -> SupervisedRoot:
    """The same with a backend for the model: what its section leaves open follows from the devices."""
    strategy = backend_for(config.engine.strategy, num_devices(config))
    return replace(config, engine=replace(config.engine, strategy=strategy))


def tensor_parallel_size(section: ActorConfig | CriticConfig | RewardModelConfig | TrainingEngineConfig) -> int:
    """Of the backend that the section names; 1 if that has no tensor parallelism."""
    backends = {"megatron": section.megatron, "torchtitan": section.torchtitan}
    named = backends.get(section.strategy or "")
    return named.tensor_model_parallel_size if named is not None else 1


def pipeline_parallel_size(section: ActorConfig | CriticConfig | RewardModelConfig | TrainingEngineConfig) -> int:
    """Stages of a model on megatron; 1 on every other backend."""
    return section.megatron.pipeline_model_parallel_size if section.strategy == "megatron" else 1


def device_pools(trainer: TrainerConfig) -> Pools:
    """The pools of a placement. What does not divide, and what would leave a device idle, is a ConfigError.

    >>> device_pools(TrainerConfig(nnodes=2, n_gpus_per_node=4))
    {'global_pool': [4, 4]}
    >>> device_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(name="split")))
    {'actor_rollout_ref_pool': [2], 'critic_pool': [2]}
    >>> device_pools(TrainerConfig(nnodes=3, n_gpus_per_node=4, placement=PlacementConfig("split", critic_devices=1)))
    {'actor_rollout_ref_pool': [4, 4], 'critic_pool': [4]}
    >>> device_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(rollout_devices=1)))
    {'global_pool': [3], 'rollout_pool': [1]}
    """
    if trainer.nnodes > 1:
        return {name: [trainer.n_gpus_per_node] * share for name, share in pool_shares(trainer).items()}
    return {name: [share] for name, share in pool_shares(trainer).items()}


def pool_shares(trainer: TrainerConfig) -> dict[str, int]:
    """Nodes of each pool or, on one node, devices."""
    placement = trainer.placement
    by_node = trainer.nnodes > 1
    total = trainer.nnodes if by_node else trainer.n_gpus_per_node
    key, unit = ("trainer.nnodes", "nodes") if by_node else ("trainer.n_gpus_per_node", "devices")
    shares: dict[str, int] = {}
    if placement.rollout_devices is not None:
        shares[ROLLOUT_POOL] = _within("rollout_devices", placement.rollout_devices, total, key, unit)
        total -= placement.rollout_devices
        key = f"{key} less trainer.placement.rollout_devices"
    if placement.name == "split":
        shares[CRITIC_POOL] = _critic_share(placement, total, key, unit)
        shares[ACTOR_POOL] = total - shares[CRITIC_POOL]
    elif placement.critic_devices is not None:
        raise ConfigError(
            f"trainer.placement.critic_devices={placement.critic_devices} has no part in colocated placement; "
            "set trainer.placement.name=split or leave it null."
        )
    else:
        shares[GLOBAL_POOL] = total
    names = [name for name in (GLOBAL_POOL, ACTOR_POOL, CRITIC_POOL, ROLLOUT_POOL) if name in shares]
    return {name: shares[name] for name in names}


def rollout_pools(trainer: TrainerConfig) -> list[str]:
    """The pools that generate, the actor's first if it is among them.

    >>> rollout_pools(TrainerConfig(n_gpus_per_node=4, placement=PlacementConfig(rollout_devices=1)))
    ['rollout_pool']
    """
    pools, asked = device_pools(trainer), trainer.placement.rollout_on
    actor_pool = next(iter(pools))
    if asked is None:
        return [ROLLOUT_POOL if ROLLOUT_POOL in pools else actor_pool]
    text = f"trainer.placement.rollout_on=[{','.join(asked)}]"
    unknown = [name for name in asked if name not in pools]
    if unknown or not asked:
        found = f"names {', '.join(unknown)}, which this placement does not have" if unknown else "names no pool"
        raise ConfigError(f"{text} {found}. The pools are: {', '.join(pools)}.")
    others = sorted(set(asked) - {actor_pool})
    if len(others) > 1 or len(set(asked)) < len(asked):
        raise ConfigError(f"{text}: name each pool once, {actor_pool} and at most one more.")
    if ROLLOUT_POOL in pools and ROLLOUT_POOL not in asked:
        raise ConfigError(f"{text} leaves rollout_pool idle; add it, or leave trainer.placement.rollout_devices null.")
    return [actor_pool] * (actor_pool in asked) + others


def _within(name: str, share: int, total: int, key: str, unit: str) -> int:
    if not 1 <= share < total:
        advice = f"Set it from 1 to {total - 1}." if total > 1 else f"Raise {key.split()[0]} or leave it null."
        raise ConfigError(f"trainer.placement.{name}={share} leaves a pool without {unit}: {key}={total}. {advice}")
    return share


def _critic_share(placement: PlacementConfig, total: int, key: str, unit: str) -> int:
    """Nodes or devices of the critic."""
    if total < 2:
        raise ConfigError(
            f"trainer.placement.name=split wants at least two {unit} for actor and critic; {key}={total}. "
            "Raise trainer.n_gpus_per_node or set trainer.placement.name=colocated."
        )
    if placement.critic_devices is not None:
        return _within("critic_devices", placement.critic_devices, total, key, unit)
    if total % 2:
        raise ConfigError(
            f"{key}={total} does not divide into two equal pools; set trainer.placement.critic_devices to the number "
            f"of {unit} for the critic (1 to {total - 1}), or change {key.split()[0]} by one."
        )
    return total // 2
