"""The trainer: builds the worker groups of a run and holds its state. `fit` is the algorithm, on one page."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from paceline.algorithms.kl import make_kl_controller
from paceline.config import ActorConfig, CriticConfig, PPOConfig, RolloutConfig, ValSamplingConfig
from paceline.config.load import load_config
from paceline.data.loader import PromptLoader, make_dataloader
from paceline.data.rl_dataset import RLHFDataset
from paceline.errors import CheckpointError, ConfigError, ResourceError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.report.files import keep_old
from paceline.schema import MODEL_INPUTS
from paceline.single_controller.base import call_tag
from paceline.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls
from paceline.trainer.device import detect_device
from paceline.trainer.ppo.checkpoint import latest_checkpoint, new_checkpoint, read_state, rewind
from paceline.trainer.ppo.phases import (
    apply_kl_penalty,
    compute_advantage,
    deal_mini_batches,
    make_requests,
    num_mini_batches,
)
from paceline.trainer.ppo.placement import uses_critic, uses_reference
from paceline.trainer.ppo.roles import ResourcePoolManager, Role
from paceline.trainer.ppo.run_log import RunLog
from paceline.trainer.ppo.validation import validate
from paceline.workers.engine_workers import RunContext

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage", "fit"]

logger = logging.getLogger(__name__)

ROLE_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
}


def fit(trainer: RayPPOTrainer) -> None:
    """PPO. A call on a worker group gives a future; calls on one pool run in order, pools run side by side.

    So what can overlap does, in any placement: nothing here knows which roles share devices.
    """
    with trainer.run():
        for requests, labels in trainer.prompt_batches():
            batch = labels.union(trainer.generate(requests).get())

            old_log_probs = trainer.compute_old_log_probs(batch)
            ref_log_probs = trainer.compute_ref_log_probs(batch)
            values = trainer.compute_values(batch)
            batch = trainer.score(batch)  # rules, in this process, while the pools compute
            batch = trainer.join(batch, old_log_probs, ref_log_probs, values)

            batch = trainer.compute_advantages(batch)

            critic_update = trainer.update_critic(batch)
            actor_update = trainer.update_actor(batch)
            trainer.end_step(batch, critic_update, actor_update)


class RayPPOTrainer:
    """One run: its data, its worker groups, its state and its phases.

    `role_worker_mapping` says which worker class plays a role, `resource_pool_manager` on which devices. Roles that
    share a pool share its processes. Datasets are built from `config.data` unless they are given.
    """

    def __init__(
        self,
        config: DictConfig | PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Enum, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        *,
        train_dataset: Any = None,
        val_dataset: Any = None,
    ) -> None:
        self.config = load_config(config)
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn

        self.use_critic = uses_critic(self.config)
        self.use_reference = uses_reference(self.config)
        self._check_roles()
        self.kl_ctrl = make_kl_controller(**asdict(self.config.algorithm.kl_ctrl))

        self.train_dataloader, self.val_dataloader = self._make_dataloaders(train_dataset, val_dataset)
        trainer = self.config.trainer
        self.total_training_steps = (
            trainer.total_training_steps
            if trainer.total_training_steps is not None
            else trainer.total_epochs * len(self.train_dataloader)
        )
        self.global_step = 0
        self.run_dir = Path(
            trainer.default_local_dir or Path("runs") / trainer.project_name / trainer.experiment_name
        ).expanduser()
        self.worker_groups: dict[Enum, RayWorkerGroup] = {}
        self._pool_groups: list[RayWorkerGroup] = []
        self.actor_rollout_wg: RayWorkerGroup | None = None
        self.critic_wg: RayWorkerGroup | None = None
        self.ref_policy_wg: RayWorkerGroup | None = None
        self.rm_wg: RayWorkerGroup | None = None

    # ---------------------------------------------------------------------------------------------- preparation

    def _check_roles(self) -> None:
        problems = []
        roles = set(self.role_worker_mapping)
        if not roles & {Role.ActorRollout, Role.ActorRolloutRef}:
            problems.append("role_worker_mapping has neither Role.ActorRollout nor Role.ActorRolloutRef; add one.")
        if self.use_critic and Role.Critic not in roles:
            estimator = self.config.algorithm.adv_estimator
            problems.append(f"algorithm.adv_estimator={estimator} needs Role.Critic in role_worker_mapping.")
        if self.use_reference and not roles & {Role.RefPolicy, Role.ActorRolloutRef}:
            problems.append(
                "a KL term is on, which needs Role.RefPolicy or Role.ActorRolloutRef in role_worker_mapping."
            )
        problems += [
            f"role {role.name} has a worker class but no pool; add it to ResourcePoolManager's mapping."
            for role in self.role_worker_mapping
            if role not in self.resource_pool_manager.mapping
        ]
        if self.reward_fn is None:
            problems.append("reward_fn is None; give RayPPOTrainer a RewardManager(tokenizer, num_examine=0).")
        if self.val_reward_fn is None and self.config.data.val_files:
            problems.append("val_reward_fn is None; give RayPPOTrainer a RewardManager(tokenizer, num_examine=1).")
        if problems:
            raise ConfigError(problems)

    def _make_dataloaders(self, train_dataset: Any, val_dataset: Any) -> tuple[PromptLoader, PromptLoader | None]:
        data, seed = self.config.data, self.config.trainer.seed
        if train_dataset is None:
            train_dataset = RLHFDataset(data.train_files, self.tokenizer, data, max_samples=data.train_max_samples)
        if val_dataset is None and data.val_files:
            val_dataset = RLHFDataset(data.val_files, self.tokenizer, data, max_samples=data.val_max_samples)
        if hasattr(self.reward_fn, "check") and hasattr(train_dataset, "column"):
            # An unknown data source is an error now, not in the middle of the run.
            self.reward_fn.check(train_dataset.column(data.reward_fn_key), train_dataset.column("reward_model"))
        train = make_dataloader(
            train_dataset,
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=seed if data.seed is None else data.seed,
        )
        val = None
        if val_dataset is not None:
            val_batch_size = data.val_batch_size or data.train_batch_size
            val = make_dataloader(val_dataset, batch_size=val_batch_size, shuffle=False, seed=seed)
        return train, val

    def init_workers(self) -> None:
        """Start the worker groups, one process per device with all roles of its pool, and load the models."""
        try:
            call_tag.set({"step": 0})
            self._start_groups()
            loading = [group.init_model() for group in self.worker_groups.values() if hasattr(group, "init_model")]
            for future in loading:
                if isinstance(future, DataProtoFuture):  # a user's worker may block instead
                    future.get()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ResourceError):
                keys = "trainer.n_gpus_per_node, trainer.nnodes, trainer.cpus_per_device"
                raise ResourceError(f"{error}\nThe keys: {keys}; ray_kwargs.ray_init.num_cpus.") from None
            raise

    def _start_groups(self) -> None:
        trainer = self.config.trainer
        device = trainer.device or detect_device()
        self.resource_pool_manager.create_resource_pool(
            nnodes=trainer.nnodes,
            device=device,
            cpus_per_device=trainer.cpus_per_device,
            threads_per_worker=trainer.threads_per_worker,
        )
        roles_of_pool: dict[str, list[Enum]] = {}
        for role in self.role_worker_mapping:
            roles_of_pool.setdefault(self.resource_pool_manager.mapping[role], []).append(role)
        for roles in roles_of_pool.values():
            classes = {role_name(role): self._class_with_args(role, device) for role in roles}
            group = self.ray_worker_group_cls(
                resource_pool=self.resource_pool_manager.get_resource_pool(roles[0]),
                ray_cls_with_init=create_colocated_worker_cls(classes),
                heartbeat_timeout_seconds=trainer.heartbeat_timeout_seconds,
            )
            self._pool_groups.append(group)
            views = group.spawn(prefix_set=set(classes))
            self.worker_groups |= {role: views[role_name(role)] for role in roles}

        groups = self.worker_groups
        self.actor_rollout_wg = groups.get(Role.ActorRollout, groups.get(Role.ActorRolloutRef))
        self.critic_wg = groups.get(Role.Critic)
        self.ref_policy_wg = groups.get(Role.RefPolicy, groups.get(Role.ActorRolloutRef))
        self.rm_wg = groups.get(Role.RewardModel)

    def _class_with_args(self, role: Enum, device: str) -> RayClassWithInitArgs:
        """Our roles get their own section of the config; a user's role gets the whole."""
        config = self.config
        sections: dict[Enum, Any] = {Role.Critic: self._critic_config()}
        for policy_role in (Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            sections[policy_role] = config.actor_rollout_ref
        trained = sections[Role.Critic] if role is Role.Critic else config.actor_rollout_ref.actor
        first_step = 1 if role is Role.Critic else config.trainer.critic_warmup + 1
        run = RunContext(
            seed=config.trainer.seed,
            device=device,
            total_optimizer_steps=self._count_optimizer_steps(trained, first_step),
            max_response_length=config.data.max_response_length,
            eos_token_ids=(self.tokenizer.eos_token_id,),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return RayClassWithInitArgs(
            cls=self.role_worker_mapping[role], config=sections.get(role, config), role=role_name(role), run=run
        )

    def _count_optimizer_steps(self, trained: ActorConfig | CriticConfig, first_step: int) -> int:
        """Optimizer steps from a training step to the end of the run; the last batch of an epoch may be smaller."""
        prompts, batch = len(self.train_dataloader.dataset), self.config.data.train_batch_size
        sizes = [min(batch, prompts - start) for start in range(0, prompts, batch)]
        per_batch = [num_mini_batches(size, trained.ppo_mini_batch_size) * trained.ppo_epochs for size in sizes]
        steps = range(first_step - 1, self.total_training_steps)
        return max(1, sum(per_batch[step % len(per_batch)] for step in steps))

    def _critic_config(self) -> CriticConfig:
        """The critic's section, with what it leaves open taken from the actor."""
        critic, policy = self.config.critic, self.config.actor_rollout_ref
        return replace(
            critic,
            ppo_mini_batch_size=critic.ppo_mini_batch_size or policy.actor.ppo_mini_batch_size,
            ppo_epochs=critic.ppo_epochs or policy.actor.ppo_epochs,
            model=replace(critic.model, path=critic.model.path or policy.model.path),
        )

    # ----------------------------------------------------------------------------------------------- the run

    def fit(self) -> None:
        """Train to the end."""
        fit(self)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Resume or begin, validate first; at the end, however it comes, close the records and stop the workers."""
        trainer = self.config.trainer
        self.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            resumed = self._resume()
            only_a_look = trainer.val_only and self.global_step > 0  # leaves the records of the run as they are
            self.log = RunLog(
                self.run_dir / "validation" if only_a_look else self.run_dir,
                self.config,
                resume_step=self.global_step if resumed and not only_a_look else None,
                step=self.global_step,
                total_steps=self.total_training_steps,
                drain_call_records=self.ray_worker_group_cls.drain_call_records,
            )
            try:
                begins = trainer.val_before_train and self.global_step == 0
                if self.val_dataloader is not None and (begins or trainer.val_only):
                    self.validate()
                    self.log.write_validation()
                yield
            finally:
                self.log.close()
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        for group in self._pool_groups:
            group.shutdown()
        self._pool_groups.clear()

    def prompt_batches(self) -> Iterator[tuple[DataProto, DataProto]]:
        """(requests for the rollout, labels of the same rows) for each step that is left."""
        config = self.config
        while self.global_step < self.total_training_steps and not config.trainer.val_only:
            for rows in self.train_dataloader:
                self.global_step += 1
                self.log.begin_step(self.global_step)
                yield make_requests(
                    rows,
                    n=config.actor_rollout_ref.rollout.n,
                    seed=config.trainer.seed,
                    purpose="training",
                    step=self.global_step,
                )
                if self.global_step >= self.total_training_steps:
                    return

    # ------------------------------------------------------------------------------------ the phases of a step

    def generate(
        self, requests: DataProto, sampling: RolloutConfig | ValSamplingConfig | None = None
    ) -> DataProtoFuture:
        """Responses to the requests, with their log-probs."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = sampling or rollout
        names = ("do_sample", "temperature", "top_p", "top_k")
        requests.meta_info["sampling"] = {
            **{name: getattr(sampling, name) for name in names},
            "ignore_eos": rollout.ignore_eos,
        }
        return self.actor_rollout_wg.generate_sequences(requests)

    def compute_old_log_probs(self, batch: DataProto) -> DataProtoFuture | None:
        """Log-probs under the policy before the update; None where the update's own forward pass gives the same."""
        actor = self.config.actor_rollout_ref.actor
        one_update = actor.ppo_epochs == 1 and num_mini_batches(len(batch), self._mini_batch_rows(actor)) == 1
        if one_update and not self.config.algorithm.use_kl_in_reward:
            return None
        return self.actor_rollout_wg.compute_log_prob(batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[]))

    def compute_ref_log_probs(self, batch: DataProto) -> DataProtoFuture | None:
        """Log-probs under the reference, where a KL term needs them."""
        if not self.use_reference:
            return None
        return self.ref_policy_wg.compute_ref_log_prob(batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[]))

    def compute_values(self, batch: DataProto) -> DataProtoFuture | None:
        """The critic's values, where there is a critic."""
        if not self.use_critic:
            return None
        return self.critic_wg.compute_values(batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[]))

    def score(self, batch: DataProto) -> DataProto:
        """Token-level scores by the reward function."""
        with self.log.phase("reward"):
            result = self.reward_fn(batch, return_dict=True)
        self.log.metrics |= result.get("metrics", {})
        return batch.union(DataProto.from_dict(tensors={"token_level_scores": result["reward_tensor"]}))

    def join(self, batch: DataProto, *columns: DataProtoFuture | None) -> DataProto:
        """Wait for columns and put them into the batch."""
        for future in columns:
            if future is not None:
                batch = batch.union(future.get())
        return batch

    def compute_advantages(self, batch: DataProto) -> DataProto:
        """Rewards (less the KL penalty, if asked), then advantages and returns."""
        algorithm = self.config.algorithm
        with self.log.phase("adv"):
            if algorithm.use_kl_in_reward:
                batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, kl_penalty=algorithm.kl_penalty)
                self.log.metrics |= kl_metrics
            else:
                scores = batch.batch["token_level_scores"]
                batch = batch.union(DataProto.from_dict(tensors={"token_level_rewards": scores}))
            return compute_advantage(
                batch,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            )

    def update_critic(self, batch: DataProto) -> DataProtoFuture | None:
        """Fit the values to the returns."""
        if not self.use_critic:
            return None
        columns = [*MODEL_INPUTS, "values", "returns"]
        return self.critic_wg.update_critic(self._deal(batch, columns, self._critic_config(), self.critic_wg))

    def update_actor(self, batch: DataProto) -> DataProtoFuture | None:
        """Improve the policy; not while the critic warms up."""
        if self.global_step <= self.config.trainer.critic_warmup:
            return None
        actor = self.config.actor_rollout_ref.actor
        columns = [*MODEL_INPUTS, "advantages"]
        columns += ["old_log_probs"] if "old_log_probs" in batch.batch else []
        columns += ["ref_log_prob"] if actor.use_kl_loss else []
        return self.actor_rollout_wg.update_actor(self._deal(batch, columns, actor, self.actor_rollout_wg))

    def _mini_batch_rows(self, section: Any) -> int:
        return section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def _deal(self, batch: DataProto, columns: list[str], section: Any, group: RayWorkerGroup) -> DataProto:
        return deal_mini_batches(
            batch.select(batch_keys=columns, non_tensor_batch_keys=[], meta_info_keys=[]),
            rows_per_mini_batch=self._mini_batch_rows(section),
            num_shards=group.world_size,
            epochs=section.ppo_epochs,
            shuffle_seed=[self.config.trainer.seed, self.global_step] if section.shuffle else None,
        )

    # -------------------------------------------------------------------------------------- the end of a step

    def end_step(
        self, batch: DataProto, critic_update: DataProtoFuture | None, actor_update: DataProtoFuture | None
    ) -> None:
        """Wait for the updates; save, validate and log what is due."""
        trainer = self.config.trainer
        for update in (critic_update, actor_update):
            if update is not None:
                self.log.metrics |= update.get()[0]
        if self.val_dataloader is not None and self._is_due(trainer.test_freq):
            self.validate()
        self.log.metrics |= {"training/global_step": self.global_step, "training/epoch": self.epoch}
        self.log.write_step(
            batch,
            tokenizer=self.tokenizer,
            use_critic=self.use_critic,
            devices=self.resource_pool_manager.get_n_gpus(),
        )
        # After the log line: a resumed run cuts lines that its checkpoint does not cover, but can't write missing ones.
        if self._is_due(trainer.save_freq):
            with self.log.phase("save_checkpoint"):
                self.save_checkpoint()

    def _is_due(self, every: int) -> bool:
        """Every so many steps, and at the end; never if that is -1."""
        return every > 0 and (self.global_step % every == 0 or self.global_step >= self.total_training_steps)

    @property
    def epoch(self) -> int:
        """The epoch that the current step belongs to, from 0."""
        return max(0, self.global_step - 1) // len(self.train_dataloader)

    def validate(self) -> None:
        """Add validation metrics of the policy as it is now to those of the step."""
        with self.log.validating():
            self.log.metrics |= validate(self, self.val_dataloader)

    # ------------------------------------------------------------------------------------------- checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _trained_groups(self) -> dict[str, RayWorkerGroup]:
        groups = {"actor": self.actor_rollout_wg}
        return groups | ({"critic": self.critic_wg} if self.use_critic else {})

    def save_checkpoint(self) -> None:
        """Everything that the next step depends on."""
        state = {
            "global_step": self.global_step,
            "dataloader": self.train_dataloader.state_dict(),
            "kl_ctrl": self.kl_ctrl.state_dict(),
        }
        with new_checkpoint(self.checkpoints, self.global_step, state) as folder:
            saving = []
            for name, group in self._trained_groups().items():
                (folder / name).mkdir()
                saving.append(group.save_checkpoint(str((folder / name).resolve())))
            for future in saving:
                future.get()
            self.tokenizer.save_pretrained(folder / "actor")

    def _resume(self) -> bool:
        """Load the checkpoint that the config names. True if it is of this run, whose records then go on."""
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            keep_old(self.checkpoints)
            return False
        if trainer.resume_mode == "resume_path":
            folder: Path | None = Path(str(trainer.resume_from_path)).expanduser()
        else:
            folder = latest_checkpoint(self.checkpoints)
        if folder is None:
            return False
        state = read_state(folder)
        missing = [name for name in self._trained_groups() if not (folder / name).is_dir()]
        if missing:
            raise CheckpointError(
                f"{folder} has no {' and no '.join(missing)}: it was saved by a run with other roles. Resume it with "
                f"the algorithm.adv_estimator that it was trained with, or set trainer.resume_mode=disable."
            )
        loading = [
            group.load_checkpoint(str((folder / name).resolve())) for name, group in self._trained_groups().items()
        ]
        for future in loading:
            future.get()
        self.global_step = state["global_step"]
        self.train_dataloader.load_state_dict(state["dataloader"])
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        logger.info("resumed from %s at step %d of %d", folder, self.global_step, self.total_training_steps)
        if self.global_step >= self.total_training_steps:
            logger.warning(
                "this run is complete; set trainer.total_training_steps higher, or trainer.resume_mode=disable."
            )
        if folder.resolve().parent != self.checkpoints.resolve():  # another run's: this folder's records begin here
            keep_old(self.checkpoints)
            return False
        rewind(self.checkpoints, folder)
        return True


def role_name(role: Enum) -> str:
    """How a role is called in errors, timelines and worker groups.

    >>> role_name(Role.RefPolicy)
    'ref'
    """
    return ROLE_NAMES.get(role, role.name.lower())
