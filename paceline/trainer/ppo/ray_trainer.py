"""The trainer: `fit` is the algorithm, on one page; RayPPOTrainer is one run, with its state and its phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from paceline.algorithms.kl import make_kl_controller
from paceline.config import PPOConfig
from paceline.config.derived import learns_from_rewards, run_dir_of
from paceline.config.load import load_config
from paceline.data.changes import DataFiles
from paceline.data.rl_dataset import Batch, Item
from paceline.files import readable_storage_errors
from paceline.protocol import DataProtoFuture
from paceline.report.ledger import LedgerFile
from paceline.run_folder import CHECKPOINTS_FOLDER, LEDGER_FILE, records_folder
from paceline.single_controller.base import call_tag
from paceline.single_controller.ray import RayWorkerGroup, limited_wait
from paceline.trainer.ppo.computed_columns import (
    apply_kl_penalty,
    compute_advantage,
    move_kl_coefficient,
)
from paceline.trainer.ppo.conversations import Conversations
from paceline.trainer.ppo.corrected_columns import correction_of
from paceline.trainer.ppo.known_names import KnownNames, check_device_name
from paceline.trainer.ppo.loaders import make_train_loader, make_val_loader
from paceline.trainer.ppo.phases import Phases
from paceline.trainer.ppo.placement import uses_critic, uses_reference, uses_reward_model
from paceline.trainer.ppo.recorder import Recorder
from paceline.trainer.ppo.roles import ResourcePoolManager, Role
from paceline.trainer.ppo.rollout_schedules import make_rollouts
from paceline.trainer.ppo.run_lock import run_lock
from paceline.trainer.ppo.run_log import RunLog
from paceline.trainer.ppo.saving import Checkpoints, Resumed
from paceline.trainer.ppo.scoring import Scoring
from paceline.trainer.ppo.step import Step, position_of
from paceline.trainer.ppo.teachers import make_teachers
from paceline.trainer.ppo.token_budgets import with_token_budgets
from paceline.trainer.ppo.validation import validate
from paceline.trainer.ppo.weight_transfer import make_weight_transfer
from paceline.trainer.ppo.worker_groups import WorkerGroups, check_roles
from paceline.trainer.progress import RunProgress
from paceline.workers.reward_worker import RewardFn

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage", "fit"]

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""How long to wait, after an error, for the files of a checkpoint that was begun before it."""


def fit(trainer: RayPPOTrainer) -> None:
    """PPO. A call on a worker group gives a future; calls on one pool run in order, pools run side by side.

    So what can overlap does, in any placement: nothing here knows which roles share devices, nor how far the rollout
    is ahead.
    """
    with trainer.run():
        previous = None
        for step in trainer.steps():  # its rollout was issued
            trainer.close(previous)  # its critic's update ends behind this rollout
            trainer.take_responses(step)

            old_log_probs = trainer.compute_old_log_probs(step.batch)
            ref_log_probs = trainer.compute_ref_log_probs(step.batch)
            values = trainer.compute_values(step.batch)
            scores = trainer.score(step.batch, step.graded)
            baselines = trainer.score_baselines(step)
            trainer.join(step, old_log_probs, ref_log_probs, values, scores, baselines)

            trainer.compute_advantages(step)

            critic_update = trainer.update_critic(step)
            actor_update = trainer.update_actor(step)
            trainer.end(step, critic_update, actor_update)
            previous = step


class RayPPOTrainer(Phases, KnownNames):
    """One run: its data, its worker groups, its state and its phases.

    `role_worker_mapping` says which worker class plays a role, `resource_pool_manager` on which devices. Roles that
    share a pool share its processes. `reward_fn` and `val_reward_fn` are called in reward processes. Datasets are built
    from `config.data` unless they are given; `processor` goes to a class of data.custom_cls that takes one. Its
    `config` is a DictConfig that can be read, and not be changed; its `cfg` is the same with types.
    """

    def __init__(
        self,
        config: DictConfig | PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Enum, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        *,
        train_dataset: Any = None,
        val_dataset: Any = None,
        processor: object = None,
        collate_fn: Callable[[Sequence[Item]], Batch] | None = None,
        train_sampler: Iterable[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        self.cfg = with_token_budgets(load_config(config))
        check_device_name(self.cfg, device_name)
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn

        self.use_critic = uses_critic(self.cfg)
        self.use_reference = uses_reference(self.cfg)
        self.use_reward_model = uses_reward_model(self.cfg)
        self.learns_from_rewards = learns_from_rewards(self.cfg)
        self.teachers = make_teachers(self.cfg, tokenizer)
        check_roles(self.cfg, role_worker_mapping, resource_pool_manager, reward_fn, val_reward_fn)
        self.kl_ctrl = make_kl_controller(**asdict(self.cfg.algorithm.kl_ctrl))
        self.correction = correction_of(self.cfg)
        self.scoring = Scoring(self.cfg, getattr(reward_fn, "has_rule", None))

        self.data_files = DataFiles(self.cfg.data, has_own=train_dataset is None)
        self.train_dataloader = make_train_loader(
            self.cfg, tokenizer, reward_fn, train_dataset, train_sampler, processor=processor, collate=collate_fn
        )
        self.val_dataloader = make_val_loader(
            self.cfg, tokenizer, val_reward_fn, val_dataset, processor=processor, collate=collate_fn
        )
        trainer = self.cfg.trainer
        self.run_dir = run_dir_of(trainer)
        self.records_dir = records_folder(self.run_dir, only_looks=trainer.val_only)
        self.total_training_steps = trainer.total_training_steps or trainer.total_epochs * len(self.train_dataloader)
        self.progress = RunProgress(self.run_dir, self.total_training_steps)
        self.groups = WorkerGroups(self.cfg, role_worker_mapping, resource_pool_manager, ray_worker_group_cls)
        self.worker_groups = self.groups.by_role
        self.rollouts = make_rollouts(self, self.total_training_steps)
        self.schedule = self.rollouts.schedule
        self.checkpoints = Checkpoints(
            self.run_dir / CHECKPOINTS_FOLDER,
            trainer,
            worker_groups=self.worker_groups,
            tokenizer=tokenizer,
            dataloader=self.train_dataloader,
            data_files=self.data_files,
            kl_ctrl=self.kl_ctrl,
            rollouts=self.rollouts,
        )
        self.conversations: Conversations | None = None
        self._open: Step | None = None
        self._taken: Step | None = None
        self._foreign: Path | None = None
        self._name_groups()

    @property
    def global_step(self) -> int:
        """The step that runs, or ran last."""
        return self.progress.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.progress.step = step

    def _look_after(self) -> None:
        """While the driver waits, whatever for."""
        with self.log.calls_of(self.global_step, self.schedule.version):
            self.rollouts.look_after()
        self.log.follow()

    def _send_first_weights(self) -> None:
        """After the models were loaded, perhaps from a checkpoint."""
        version = self.schedule.version
        self.actor_rollout_wg.set_version(version)
        self.send_weights(version)

    def init_workers(self) -> None:
        """Start the worker groups, one process per device with all roles of its pool, and load the models."""
        with readable_storage_errors(self.records_dir), run_lock(self.records_dir):
            pass  # Another run in this folder is an error before models are loaded; `run` holds the lock.
        call_tag.set({"step": 0})
        self.groups.start(
            self.tokenizer,
            (self.reward_fn, self.val_reward_fn),
            num_prompts=self.train_dataloader.num_prompts,
            last_step=self.total_training_steps,
        )
        self._name_groups()
        if self.groups.agents is not None:
            self.conversations = Conversations(self.groups.agents, self.groups.generating[0])
        way = self.cfg.actor_rollout_ref.rollout.weight_transfer
        self.weight_transfer = make_weight_transfer(way, self.actor_rollout_wg, self.rollout_wg)

    def _name_groups(self) -> None:
        """The groups by the names that phases and users' code know; None before they start."""
        groups = self.groups
        self.actor_rollout_wg = groups.first_of(Role.ActorRollout, Role.ActorRolloutRef, Role.Actor)
        self.rollout_wg = groups.first_of(Role.Rollout)
        self.critic_wg = groups.first_of(Role.Critic)
        self.ref_policy_wg = groups.first_of(Role.RefPolicy, Role.ActorRolloutRef)
        self.rm_wg = groups.first_of(Role.RewardModel)
        self.teacher_wg = groups.first_of(Role.Teacher)

    # ----------------------------------------------------------------------------------------------- the run

    def fit(self) -> None:
        """Train to the end."""
        fit(self)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Resume or begin, validate first; at the end, however it comes, close the records and stop the workers."""
        trainer = self.cfg.trainer
        with ExitStack() as ending:
            ending.callback(self.shutdown)
            ending.enter_context(readable_storage_errors(self.records_dir))
            ending.enter_context(run_lock(self.records_dir))
            resumed = self._resume()
            continues = resumed is not None and resumed.is_own and not trainer.val_only
            self._send_first_weights()
            self.log = RunLog(
                self.records_dir,
                self.cfg,
                self.tokenizer,
                resume_step=self.global_step if continues else None,
                step=self.global_step,
                total_steps=self.total_training_steps,
                pools=self.resource_pool_manager.resource_pool_spec,
                pool_of_role=self.groups.pool_of_role(),
                drain_call_records=self.ray_worker_group_cls.drain_call_records,
                running_calls=self.ray_worker_group_cls.running_calls,
                queue=self.rollouts.queue,
            )
            with closing(self.log):
                self._foreign = resumed.folder if resumed is not None and not resumed.is_own else None
                self.recorder = Recorder(
                    self.cfg, self.records_dir, self.checkpoints, self._facts(), self.global_step, continues=continues
                )
                try:
                    self._open_ledger(continues, resumed)
                    begins = trainer.val_before_train and self.global_step == 0
                    if self.val_dataloader is not None and (begins or trainer.val_only):
                        self.log.write_validation(self.validate())
                    with self.ray_worker_group_cls.meanwhile(self._look_after):
                        yield
                except Exception as error:
                    self._save_what_is_complete(error)
                    self.log.end("failed", error)
                    raise
                self.log.end(self.progress.end)

    def _resume(self) -> Resumed | None:
        """Go to the checkpoint that the config names, if there is one."""
        resumed = self.checkpoints.resume()
        if resumed is not None:
            self.progress.go_on_from(resumed.folder, resumed.step)
        return resumed

    def _open_ledger(self, continues: bool, resumed: Resumed | None) -> None:
        """The ledger goes on as the metrics do; val_only trains nothing."""
        if self.cfg.trainer.val_only:
            return
        self.ledger = LedgerFile(self.records_dir / LEDGER_FILE, self.global_step if continues else None)
        self.ledger.start(
            position_of(self.train_dataloader),
            prompts=self.train_dataloader.num_prompts,
            waiting=self.rollouts.num_prompts,
            again=resumed is not None and resumed.begins_epoch_again,
        )
        self._check_ledger()

    def _facts(self) -> dict[str, object]:
        """What a bundle of the flight recorder must know of the run beside its configuration."""
        classes = {getattr(role, "name", str(role)): cls.__qualname__ for role, cls in self.role_worker_mapping.items()}
        return {
            "num_prompts": self.train_dataloader.num_prompts,
            "total_steps": self.total_training_steps,
            "workers": classes,
        }

    def _check_ledger(self) -> None:
        """Every prompt that was drawn is trained, dropped or under way."""
        self.ledger.require_balance(position_of(self.train_dataloader), self.rollouts.num_prompts)

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        self.groups.shutdown()

    def steps(self) -> Iterator[Step]:
        """Each step that is left, with its prompts; its rollout was issued, by the weights that the schedule names."""
        while not (self.progress.is_last or self.cfg.trainer.val_only):
            self.progress.step += 1
            self.log.begin_step(self.global_step)
            step = self.rollouts.next_step()
            self.recorder.begin(step, self._foreign)
            self._taken = step
            yield step

    # -------------------------------------------------------------------------------------- the end of a step

    def end(self, step: Step, *updates: DataProtoFuture | None) -> None:
        """Validate and save what is due. The updates may go on: the step is closed when the next rollout was issued."""
        trainer = self.cfg.trainer
        step.updates = [update for update in updates if update is not None]
        self._open = step
        if trainer.overlap != "full":
            for update in step.updates:
                update.get()
        if self.val_dataloader is not None and self.progress.is_due(trainer.test_freq):
            step.metrics |= self.validate()
        stops = self.progress.look_for_stop()
        if self.progress.is_last:
            self.close(step)
        asked = self.progress.is_asked_to_save()
        if asked or stops or self.progress.is_due(trainer.save_freq):
            with self.log.phase("save_checkpoint"):
                self.checkpoints.begin(step.number)
        if self.progress.is_last:
            self.finish_checkpoint()

    def close(self, step: Step | None) -> None:
        """Wait for the updates of a step, if there is one, and write its line."""
        self.checkpoints.follow()
        if step is None:
            return
        for update in step.updates:
            step.metrics |= update.get()[0]
        self._open = None
        coefficient = self.kl_ctrl.value
        self._follow_kl(step)
        step.metrics |= {"training/global_step": step.number, "training/epoch": step.epoch}
        metrics = self.log.write_step(step, use_critic=self.use_critic, devices=self.resource_pool_manager.get_n_gpus())
        with self.log.phase("record") if step.recorded is not None else nullcontext():
            self.recorder.close(step, metrics, coefficient)
        self._taken = None if self._taken is step else self._taken
        self.ledger.write(step.number, *step.accounted())
        self.rollouts.closed(step)
        self.groups.step_closed(step.number)
        self._check_ledger()

    def _follow_kl(self, step: Step) -> None:
        """Move the KL coefficient; not after a step, or an optimizer step of it, that was left out."""
        skipped = any(step.metrics.get(f"{role}/skipped_updates") for role in ("actor", "critic"))
        if self.cfg.algorithm.use_kl_in_reward and not skipped and not step.is_left_out:
            move_kl_coefficient(step.batch, self.kl_ctrl, step.metrics)

    def _save_what_is_complete(self, error: Exception) -> None:
        """After an error: the step before may lack nothing but its line, and its checkpoint the last file."""
        try:
            with limited_wait(SAVE_SECONDS):  # ranks may be stuck in a collective with the one that failed
                try:
                    self.close(self._open)
                    self.finish_checkpoint()
                finally:
                    self.recorder.fail(self._taken, error, self.kl_ctrl.value)
        except Exception as error:
            logger.warning("the last step is not in the metrics, or not saved: %s", error)

    def validate(self) -> dict[str, float]:
        """Validation metrics of the policy as it is now."""
        sampling = self.cfg.actor_rollout_ref.rollout.val_kwargs
        assert self.val_dataloader is not None
        with self.log.validating(len(self.val_dataloader.dataset)):
            return validate(
                self.val_dataloader,
                lambda requests, labels: self.generate(
                    requests, sampling, labels=labels, version=self.schedule.version
                ),
                lambda batch: self.grade(batch, validation=True),
                self.log,
                n=sampling.n,
                seed=self.cfg.trainer.seed,
                source_key=self.cfg.data.reward_fn_key,
                by_turns=self.cfg.actor_rollout_ref.rollout.agent.rewards != "end",
            )
