"""The worker groups of a run: one process per device with all roles of its pool, and the reward processes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.config import ActorConfig, CriticConfig, PPOConfig
from paceline.config.derived import (
    REWARD_MODEL_POOL,
    TEACHER_POOL,
    critic_config,
    policy_config,
    reward_model_config,
    update_sizes,
    uses_agents,
)
from paceline.errors import ConfigError, ResourceError
from paceline.protocol import DataProtoFuture
from paceline.single_controller.ray import (
    ProcessPool,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from paceline.single_controller.ray.column_store import ColumnStore, ObjectStore
from paceline.single_controller.ray.queue_store import QueueSession, QueueStore
from paceline.trainer.device import detect_device
from paceline.trainer.ppo.corrected_columns import correction_of
from paceline.trainer.ppo.dealing import num_mini_batches
from paceline.trainer.ppo.placement import uses_critic, uses_reference, uses_reward_model
from paceline.trainer.ppo.roles import ResourcePoolManager, Role, role_name
from paceline.workers.agent_worker import AgentWorker
from paceline.workers.engine_workers import RunContext
from paceline.workers.reward_worker import RewardFn, RewardWorker

REWARD_POOL = "reward_pool"
AGENT_POOL = "agent_pool"


def check_roles(
    config: PPOConfig,
    role_worker_mapping: Mapping[Enum, type],
    resource_pool_manager: ResourcePoolManager,
    reward_fn: RewardFn | None,
    val_reward_fn: RewardFn | None,
) -> None:
    """Raise ConfigError for every role, pool and reward function that the run needs and does not have."""
    problems = []
    roles = set(role_worker_mapping)
    if not (roles & {Role.ActorRollout, Role.ActorRolloutRef} or roles >= {Role.Actor, Role.Rollout}):
        problems.append(
            "role_worker_mapping has neither Role.ActorRollout nor Role.ActorRolloutRef; add one, or both of "
            "Role.Actor and Role.Rollout."
        )
    if uses_critic(config) and Role.Critic not in roles:
        estimator = config.algorithm.adv_estimator
        problems.append(f"algorithm.adv_estimator={estimator} needs Role.Critic in role_worker_mapping.")
    if uses_reference(config) and not roles & {Role.RefPolicy, Role.ActorRolloutRef}:
        problems.append("a KL term is on, which needs Role.RefPolicy or Role.ActorRolloutRef in role_worker_mapping.")
    if uses_reward_model(config) and Role.RewardModel not in roles:
        problems.append("reward_model.enable=True needs Role.RewardModel in role_worker_mapping.")
    if config.distillation.enabled and Role.Teacher not in roles:
        problems.append("distillation.enabled=True needs Role.Teacher in role_worker_mapping.")
    problems += [
        f"role {role.name} has a worker class but no pool; add it to ResourcePoolManager's mapping."
        for role in role_worker_mapping
        if role not in resource_pool_manager.mapping
    ]
    if reward_fn is None:
        problems.append("reward_fn is None; give RayPPOTrainer a RewardManager(tokenizer, num_examine=0).")
    if val_reward_fn is None and config.data.val_files:
        problems.append("val_reward_fn is None; give RayPPOTrainer a RewardManager(tokenizer, num_examine=1).")
    if problems:
        raise ConfigError(problems)


class WorkerGroups:
    """Starts the worker groups of a run and ends them; `by_role` has the group of each role."""

    def __init__(
        self,
        config: PPOConfig,
        role_worker_mapping: Mapping[Enum, type],
        resource_pool_manager: ResourcePoolManager,
        group_cls: type[RayWorkerGroup],
    ) -> None:
        self.config = config
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.group_cls = group_cls
        self.by_role: dict[Enum, RayWorkerGroup] = {}
        self.reward: RayWorkerGroup
        self.agents: RayWorkerGroup | None = None
        self._pools: list[RayWorkerGroup] = []
        self._store: ColumnStore | None = None
        self._queue: QueueSession | None = None

    def start(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reward_fns: tuple[RewardFn | None, RewardFn | None],
        *,
        num_prompts: int,
        last_step: int,
    ) -> None:
        """Start all processes and load the models; if that fails, nothing is left behind."""
        try:
            self._store = self._open_store()
            self._start_pools(tokenizer, self._optimizer_steps(num_prompts, last_step))
            self.reward = self._start_group(
                ProcessPool(self.config.reward_model.num_workers, REWARD_POOL),
                RayClassWithInitArgs(RewardWorker, *reward_fns),
                name_prefix="reward",
            )
            rollout = self.config.actor_rollout_ref.rollout
            if uses_agents(self.config):
                self.agents = self._start_group(
                    ProcessPool(rollout.agent.num_workers, AGENT_POOL),
                    RayClassWithInitArgs(
                        AgentWorker,
                        rollout,
                        self.config.data,
                        tokenizer,
                        with_chats=uses_reward_model(self.config),  # it may have to read them in a template of its own
                    ),
                    name_prefix="agent",
                )
            for group in self._pools:
                group.construct_workers()
            loading = [group.init_model() for group in self.by_role.values() if hasattr(group, "init_model")]
            for future in loading:
                if isinstance(future, DataProtoFuture):  # a user's worker may block instead
                    future.get()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ResourceError):
                keys = "trainer.n_gpus_per_node, trainer.nnodes, trainer.cpus_per_device"
                raise ResourceError(f"{error}\nThe keys: {keys}; ray_kwargs.ray_init.num_cpus and address.") from None
            raise

    def first_of(self, *roles: Enum) -> Any:
        """The group of the first of these roles that the run has, or None. `check_roles` says which a run must have."""
        return next((self.by_role[role] for role in roles if role in self.by_role), None)

    @property
    def generating(self) -> list[RayWorkerGroup]:
        """The groups that sample responses, each with its copy of the policy."""
        roles = (Role.ActorRollout, Role.ActorRolloutRef, Role.Rollout)
        return [group for role, group in self.by_role.items() if role in roles]

    def pool_of_role(self) -> dict[str, str]:
        """By the name of a role: the pool that it runs on."""
        pools = {role_name(role): pool for role, pool in self.resource_pool_manager.mapping.items()}
        return {**pools, "reward": REWARD_POOL, "agent": AGENT_POOL}

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        for group in self._pools:
            group.shutdown()
        self._pools.clear()

    def _optimizer_steps(self, num_prompts: int, last_step: int) -> dict[Enum, int]:
        """Of each role that trains: its optimizer steps in the whole run, which schedules of learning rates need."""
        config = self.config
        actor = (config.actor_rollout_ref.actor, max(1, config.trainer.critic_warmup))
        trained: dict[Enum, tuple[ActorConfig | CriticConfig, int]] = {Role.Critic: (critic_config(config), 1)}
        trained |= dict.fromkeys((Role.Actor, Role.ActorRollout, Role.ActorRolloutRef), actor)
        return {
            role: count_optimizer_steps(
                section,
                prompts=num_prompts,
                batch=config.data.train_batch_size,
                drop_last=config.data.drop_last,
                first_step=first_step,
                last_step=last_step,
            )
            for role, (section, first_step) in trained.items()
        }

    def _start_pools(self, tokenizer: PreTrainedTokenizerBase, num_optimizer_steps: Mapping[Enum, int]) -> None:
        trainer = self.config.trainer
        device = trainer.device or detect_device()
        self.resource_pool_manager.create_resource_pool(
            nnodes=trainer.nnodes,
            device=device,
            cpus_per_device=trainer.cpus_per_device,
            threads_per_worker=trainer.threads_per_worker,
            wait_for_nodes_seconds=trainer.wait_for_nodes_seconds,
            apart=[REWARD_MODEL_POOL, TEACHER_POOL],
        )
        run = RunContext(
            seed=trainer.seed,
            device=device,
            total_optimizer_steps=0,
            max_prompt_length=self.config.data.max_prompt_length,
            max_response_length=self.config.data.max_response_length,
            eos_token_ids=(tokenizer.eos_token_id,),
            pad_token_id=tokenizer.pad_token_id,
            skip_nonfinite=trainer.on_nonfinite == "skip",
            correction=correction_of(self.config),
            collective_timeout_seconds=self.config.actor_rollout_ref.nccl_timeout,
            distillation=self.config.distillation.distillation_loss if self.config.distillation.enabled else None,
        )
        roles_of_pool: dict[str, list[Enum]] = {}
        for role in self.role_worker_mapping:
            roles_of_pool.setdefault(self.resource_pool_manager.mapping[role], []).append(role)
        for roles in roles_of_pool.values():
            classes = {
                role_name(role): self._class_with_args(
                    role, replace(run, total_optimizer_steps=num_optimizer_steps.get(role, 0))
                )
                for role in roles
            }
            pool = self.resource_pool_manager.get_resource_pool(roles[0])
            group = self._start_group(pool, create_colocated_worker_cls(classes))
            views = group.spawn(prefix_set=set(classes))
            self.by_role |= {role: views[role_name(role)] for role in roles}

    def _start_group(
        self, pool: RayResourcePool | ProcessPool, classes: RayClassWithInitArgs, name_prefix: str | None = None
    ) -> RayWorkerGroup:
        """Start processes without waiting for them, so that those of all pools start at the same time."""
        group = self.group_cls(
            resource_pool=pool,
            ray_cls_with_init=classes,
            name_prefix=name_prefix,
            heartbeat_timeout_seconds=self.config.trainer.heartbeat_timeout_seconds,
            wait=False,
        )
        if issubclass(self.group_cls, RayWorkerGroup):  # a group in this process has no store
            group.column_store = self._store
        self._pools.append(group)
        return group

    def _open_store(self) -> ColumnStore | None:
        """Where large columns of answers stay."""
        config, min_bytes = self.config, self.config.trainer.columns_stay_bytes
        if min_bytes is None or not issubclass(self.group_cls, RayWorkerGroup):
            return None
        if not config.transfer_queue.enable:
            return ObjectStore(min_bytes)
        store = QueueStore(f"paceline-{uuid.uuid4().hex[:12]}", config.trainer.schedule.max_staleness, min_bytes)
        self._queue = QueueSession(store, config.transfer_queue.num_storage_units)
        return store

    def step_closed(self, step: int) -> None:
        """Columns of steps that are over need not be kept."""
        if self._store is not None:
            self._store.step_closed(step)

    def _class_with_args(self, role: Enum, run: RunContext) -> RayClassWithInitArgs:
        """Our roles get their own section of the config; a teacher and a user's role get the whole."""
        config = self.config
        sections: dict[Enum, object] = dict.fromkeys(
            (Role.Actor, Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy),
            policy_config(config),
        )
        sections |= {Role.Critic: critic_config(config), Role.RewardModel: reward_model_config(config)}
        return RayClassWithInitArgs(
            cls=self.role_worker_mapping[role], config=sections.get(role, config), role=role_name(role), run=run
        )


def count_optimizer_steps(
    trained: ActorConfig | CriticConfig, *, prompts: int, batch: int, drop_last: bool, first_step: int, last_step: int
) -> int:
    """Optimizer steps from a training step to the last; the last batch of an epoch may be smaller."""
    sizes = [min(batch, prompts - start) for start in range(0, prompts, batch)]
    if drop_last and sizes[-1] < batch:
        sizes.pop()
    mini_batch_size, passes = update_sizes(trained)
    per_batch = [num_mini_batches(size, mini_batch_size) * passes for size in sizes]

    def until(step: int) -> int:
        epochs, rest = divmod(step, len(per_batch))
        return epochs * sum(per_batch) + sum(per_batch[:rest])

    return max(1, until(max(last_step, first_step - 1)) - until(first_step - 1))
