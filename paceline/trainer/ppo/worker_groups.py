"""The worker groups of a run: one process per device with all roles of its pool, and the reward processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.config import ActorConfig, CriticConfig, PPOConfig
from paceline.config.derived import critic_config, reward_model_config
from paceline.errors import ResourceError
from paceline.protocol import DataProtoFuture
from paceline.single_controller.ray import (
    ProcessPool,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from paceline.trainer.device import detect_device
from paceline.trainer.ppo.phases import num_mini_batches
from paceline.trainer.ppo.roles import ResourcePoolManager, Role, role_name
from paceline.workers.engine_workers import RunContext
from paceline.workers.reward_worker import RewardWorker

REWARD_POOL = "reward_pool"


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
        self.reward: RayWorkerGroup | None = None
        self._pools: list[RayWorkerGroup] = []

    def start(
        self, tokenizer: PreTrainedTokenizerBase, num_optimizer_steps: Mapping[Enum, int], reward_fns: tuple[Any, Any]
    ) -> None:
        """Start all processes and load the models; if that fails, nothing is left behind."""
        try:
            self._start_pools(tokenizer, num_optimizer_steps)
            self.reward = self._start_group(
                ProcessPool(self.config.reward_model.num_workers, REWARD_POOL),
                RayClassWithInitArgs(RewardWorker, *reward_fns),
                name_prefix="reward",
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

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        for group in self._pools:
            group.shutdown()
        self._pools.clear()

    def _start_pools(self, tokenizer: PreTrainedTokenizerBase, num_optimizer_steps: Mapping[Enum, int]) -> None:
        trainer = self.config.trainer
        device = trainer.device or detect_device()
        self.resource_pool_manager.create_resource_pool(
            nnodes=trainer.nnodes,
            device=device,
            cpus_per_device=trainer.cpus_per_device,
            threads_per_worker=trainer.threads_per_worker,
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
        self._pools.append(group)
        return group

    def _class_with_args(self, role: Enum, run: RunContext) -> RayClassWithInitArgs:
        """Our roles get their own section of the config; a user's role gets the whole."""
        config = self.config
        sections: dict[Enum, Any] = dict.fromkeys(
            (Role.Actor, Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy),
            config.actor_rollout_ref,
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
    per_batch = [num_mini_batches(size, trained.ppo_mini_batch_size) * trained.ppo_epochs for size in sizes]

    def until(step: int) -> int:
        epochs, rest = divmod(step, len(per_batch))
        return epochs * sum(per_batch) + sum(per_batch[:rest])

    return max(1, until(max(last_step, first_step - 1)) - until(first_step - 1))
