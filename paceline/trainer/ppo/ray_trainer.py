"""The trainer: `fit` is the algorithm, on one page; RayPPOTrainer is one run, with its state and its phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from paceline.algorithms.advantages import needs_baseline
from paceline.algorithms.kl import make_kl_controller
from paceline.config import PPOConfig, RolloutConfig, ValSamplingConfig
from paceline.config.derived import critic_config
from paceline.config.load import load_config
from paceline.data.changes import DataFiles
from paceline.data.loader import PromptLoader, make_dataloader
from paceline.data.rl_dataset import RLHFDataset
from paceline.errors import ConfigError, NonFiniteError
from paceline.files import storage_errors_in_words
from paceline.protocol import DataProto, DataProtoFuture
from paceline.run_folder import METRICS_FILE, STOP_FILE, VALIDATION_FOLDER, default_run_dir
from paceline.schema import MODEL_INPUTS
from paceline.single_controller.base import call_tag
from paceline.single_controller.ray import RayWorkerGroup, limited_wait
from paceline.trainer.ppo.memory import validation_batch_size
from paceline.trainer.ppo.phases import (
    apply_kl_penalty,
    balanced_order,
    compute_advantage,
    deal_mini_batches,
    make_requests,
    move_kl_coefficient,
    nonfinite_places,
    num_mini_batches,
    rollout_mismatch,
    share_out,
    subtract_kl,
)
from paceline.trainer.ppo.placement import uses_critic, uses_reference, uses_reward_model
from paceline.trainer.ppo.roles import ResourcePoolManager, Role, role_name
from paceline.trainer.ppo.run_lock import run_lock
from paceline.trainer.ppo.run_log import RunLog
from paceline.trainer.ppo.sampling import refill_groups
from paceline.trainer.ppo.saving import Checkpoints
from paceline.trainer.ppo.scoring import PendingScores, Scoring, baseline_metrics, check_scorable
from paceline.trainer.ppo.validation import validate
from paceline.trainer.ppo.worker_groups import REWARD_POOL, WorkerGroups, count_optimizer_steps

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage", "fit"]

logger = logging.getLogger(__name__)

ANSWERS = ("old_log_probs", "ref_log_prob", "values", "token_level_scores", "reward_baselines")
"""Columns that come from models and graders."""
SAVE_SECONDS = 60.0
"""How long to wait, after an error, for the files of a checkpoint that was begun before it."""

GENERATING_ROLES = (Role.ActorRollout, Role.ActorRolloutRef, Role.Rollout)


def fit(trainer: RayPPOTrainer) -> None:
    """PPO. A call on a worker group gives a future; calls on one pool run in order, pools run side by side.

    So what can overlap does, in any placement: nothing here knows which roles share devices.
    """
    with trainer.run():
        for requests, labels in trainer.prompt_batches():
            responses = trainer.generate(requests)
            greedy = trainer.generate_greedy(requests)
            trainer.close_step()  # the one before: its critic's update ends behind this rollout
            batch = trainer.refill(labels.union(responses.get()))

            old_log_probs = trainer.compute_old_log_probs(batch)
            ref_log_probs = trainer.compute_ref_log_probs(batch)
            values = trainer.compute_values(batch)
            scores = trainer.score(batch)
            baselines = trainer.score_baselines(labels, greedy)
            batch = trainer.join(batch, old_log_probs, ref_log_probs, values, scores, baselines)

            batch = trainer.compute_advantages(batch)

            critic_update = trainer.update_critic(batch)
            actor_update = trainer.update_actor(batch)
            trainer.end_step(batch, critic_update, actor_update)


@dataclass(frozen=True)
class Later:
    """Like a future, of something that is put together here when it is asked for."""

    get: Callable[[], DataProto]


@dataclass(frozen=True)
class OpenStep:
    """A step whose updates were issued and whose line is not written yet."""

    number: int
    epoch: int
    batch: DataProto
    updates: tuple[DataProtoFuture | None, ...]


class RayPPOTrainer:
    """One run: its data, its worker groups, its state and its phases.

    `role_worker_mapping` says which worker class plays a role, `resource_pool_manager` on which devices. Roles that
    share a pool share its processes. `reward_fn` and `val_reward_fn` are called in reward processes. Datasets are built
    from `config.data` unless they are given.
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
        self.use_reward_model = uses_reward_model(self.config)
        self._check_roles()
        self.kl_ctrl = make_kl_controller(**asdict(self.config.algorithm.kl_ctrl))
        self.scoring = Scoring(self.config, getattr(reward_fn, "has_rule", None))

        self.data_files = DataFiles(self.config.data, has_own=train_dataset is None)
        self.train_dataloader, self.val_dataloader = self._make_dataloaders(train_dataset, val_dataset)
        trainer = self.config.trainer
        self.total_training_steps = (
            trainer.total_training_steps
            if trainer.total_training_steps is not None
            else trainer.total_epochs * len(self.train_dataloader)
        )
        self.global_step = 0
        self.run_dir = Path(
            trainer.default_local_dir or default_run_dir(trainer.project_name, trainer.experiment_name)
        ).expanduser()
        self.checkpoints = Checkpoints(self)
        # A look at a run that has records leaves them as they are; the run may be going on.
        only_a_look = self.config.trainer.val_only and (self.run_dir / METRICS_FILE).exists()
        self.records_dir = self.run_dir / VALIDATION_FOLDER if only_a_look else self.run_dir
        self._stop_file = self.run_dir / STOP_FILE
        self._stopping = False
        self._open_step: OpenStep | None = None
        self._left_out: int | None = None
        self._groups = WorkerGroups(self.config, role_worker_mapping, resource_pool_manager, ray_worker_group_cls)
        self.worker_groups = self._groups.by_role
        self.actor_rollout_wg: RayWorkerGroup | None = None
        self.critic_wg: RayWorkerGroup | None = None
        self.ref_policy_wg: RayWorkerGroup | None = None
        self.rm_wg: RayWorkerGroup | None = None
        self.rollout_wg: RayWorkerGroup | None = None
        self.reward_wg: RayWorkerGroup | None = None

    # ---------------------------------------------------------------------------------------------- preparation

    def _check_roles(self) -> None:
        problems = []
        roles = set(self.role_worker_mapping)
        if not (roles & {Role.ActorRollout, Role.ActorRolloutRef} or roles >= {Role.Actor, Role.Rollout}):
            problems.append(
                "role_worker_mapping has neither Role.ActorRollout nor Role.ActorRolloutRef; add one, or both of "
                "Role.Actor and Role.Rollout."
            )
        if self.use_critic and Role.Critic not in roles:
            estimator = self.config.algorithm.adv_estimator
            problems.append(f"algorithm.adv_estimator={estimator} needs Role.Critic in role_worker_mapping.")
        if self.use_reference and not roles & {Role.RefPolicy, Role.ActorRolloutRef}:
            problems.append(
                "a KL term is on, which needs Role.RefPolicy or Role.ActorRolloutRef in role_worker_mapping."
            )
        if self.use_reward_model and Role.RewardModel not in roles:
            problems.append("reward_model.enable=True needs Role.RewardModel in role_worker_mapping.")
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
        if self.use_reward_model:  # it may have to read the chat in a template of its own
            data = replace(data, return_raw_chat=True)
        if train_dataset is None:
            train_dataset = RLHFDataset(data.train_files, self.tokenizer, data, max_samples=data.train_max_samples)
        if val_dataset is None and data.val_files:
            val_dataset = RLHFDataset(data.val_files, self.tokenizer, data, max_samples=data.val_max_samples)
        check_scorable(self.reward_fn, train_dataset, data.reward_fn_key, has_model=self.use_reward_model)
        train = make_dataloader(
            train_dataset,
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=seed if data.seed is None else data.seed,
            drop_last=data.drop_last,
        )
        val = None
        if val_dataset is not None:
            by_model = self.use_reward_model and self.config.reward_model.validate
            check_scorable(self.val_reward_fn, val_dataset, data.reward_fn_key, has_model=by_model, validation=True)
            val_batch_size = data.val_batch_size or validation_batch_size(self.config)
            val = make_dataloader(val_dataset, batch_size=val_batch_size, shuffle=False, seed=seed)
        return train, val

    def init_workers(self) -> None:
        """Start the worker groups, one process per device with all roles of its pool, and load the models."""
        with storage_errors_in_words(self.records_dir), run_lock(self.records_dir):
            pass  # Another run in this folder is told of before models are loaded; `run` holds the lock.
        call_tag.set({"step": 0})
        trained = {
            Role.ActorRollout: (self.config.actor_rollout_ref.actor, max(1, self.config.trainer.critic_warmup)),
            Role.Critic: (critic_config(self.config), 1),
        }
        trained[Role.ActorRolloutRef] = trained[Role.Actor] = trained[Role.ActorRollout]
        steps = {
            role: count_optimizer_steps(
                section,
                prompts=len(self.train_dataloader.dataset),
                batch=self.config.data.train_batch_size,
                drop_last=self.config.data.drop_last,
                first_step=first_step,
                last_step=self.total_training_steps,
            )
            for role, (section, first_step) in trained.items()
        }
        self._groups.start(self.tokenizer, steps, (self.reward_fn, self.val_reward_fn))
        groups = self.worker_groups
        self.actor_rollout_wg = groups.get(Role.ActorRollout, groups.get(Role.ActorRolloutRef, groups.get(Role.Actor)))
        self.rollout_wg = groups.get(Role.Rollout)
        self._generating = [group for role, group in groups.items() if role in GENERATING_ROLES]
        if self.rollout_wg is not None:
            self._num_weight_buckets = self.actor_rollout_wg.count_weight_buckets().get()[0]
        self.critic_wg = groups.get(Role.Critic)
        self.ref_policy_wg = groups.get(Role.RefPolicy, groups.get(Role.ActorRolloutRef))
        self.rm_wg = groups.get(Role.RewardModel)
        self.reward_wg = self._groups.reward

    # ----------------------------------------------------------------------------------------------- the run

    def fit(self) -> None:
        """Train to the end."""
        fit(self)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Resume or begin, validate first; at the end, however it comes, close the records and stop the workers."""
        trainer = self.config.trainer
        only_a_look = self.records_dir != self.run_dir
        with ExitStack() as ending:
            ending.callback(self.shutdown)
            ending.enter_context(storage_errors_in_words(self.records_dir))
            ending.enter_context(run_lock(self.records_dir))
            resumed = self.checkpoints.resume()
            self.send_weights()
            self.log = RunLog(
                self.records_dir,
                self.config,
                resume_step=self.global_step if resumed and not only_a_look else None,
                step=self.global_step,
                total_steps=self.total_training_steps,
                pools=list(self.resource_pool_manager.resource_pool_spec),
                pool_of_role=self._pool_of_role(),
                drain_call_records=self.ray_worker_group_cls.drain_call_records,
                running_calls=self.ray_worker_group_cls.running_calls,
            )
            with closing(self.log):
                try:
                    begins = trainer.val_before_train and self.global_step == 0
                    if self.val_dataloader is not None and (begins or trainer.val_only):
                        self.validate()
                        self.log.write_validation()
                    yield
                except Exception as error:
                    self._save_what_is_complete()
                    self.log.end("failed", error)
                    raise
                self.log.end("stopped" if self._stopping else "finished")

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        self._groups.shutdown()

    def _pool_of_role(self) -> dict[str, str]:
        pools = {role_name(role): pool for role, pool in self.resource_pool_manager.mapping.items()}
        return {**pools, "reward": REWARD_POOL}

    def prompt_batches(self) -> Iterator[tuple[DataProto, DataProto]]:
        """(requests for the rollout, labels of the same rows) for each step that is left."""
        while not (self._is_last or self.config.trainer.val_only):
            self.global_step += 1
            self.log.begin_step(self.global_step)
            yield self.draw_requests("training")

    def draw_requests(self, purpose: str) -> tuple[DataProto, DataProto]:
        """Requests for the next prompts, and their labels. Another purpose in one step draws other random numbers."""
        config = self.config
        return make_requests(
            next(iter(self.train_dataloader)),
            n=config.actor_rollout_ref.rollout.n,
            seed=config.trainer.seed,
            purpose=purpose,
            step=self.global_step,
        )

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
        shares = share_out(len(requests), [group.world_size for group in self._generating])
        parts = [
            group.generate_sequences(requests[rows])
            for group, rows in zip(self._generating, shares, strict=True)
            if rows.stop > rows.start
        ]
        return self._issued(DataProtoFuture.concat(parts) if len(parts) > 1 else parts[0])

    def generate_greedy(self, requests: DataProto) -> DataProtoFuture | None:
        """The most likely response to each prompt, if ReMax wants it for a baseline."""
        if not needs_baseline(self.config.algorithm.adv_estimator):
            return None
        rollout = self.config.actor_rollout_ref.rollout
        return self.generate(requests[:: rollout.n], replace(rollout, do_sample=False))

    def refill(self, batch: DataProto) -> DataProto:
        """DAPO's dynamic sampling, if asked for: groups of equal scores are replaced by those of further prompts."""
        return refill_groups(self, batch) if self.config.algorithm.filter_groups.enable else batch

    def compute_old_log_probs(self, batch: DataProto) -> Later | None:
        """Log-probs under the policy before the update.

        None where the update's own forward pass gives the same, and the rollout's log-probs are known to be these:
        those of other engines are compared at every step, unless they are trusted.
        """
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        if rollout.trust_log_probs:
            return Later(lambda: DataProto.from_dict(tensors={"old_log_probs": batch.batch["rollout_log_probs"]}))
        one_update = actor.ppo_epochs == 1 and num_mini_batches(len(batch), self._mini_batch_rows(actor)) == 1
        dtype = rollout.dtype or self.config.actor_rollout_ref.model.compute_dtype
        is_exact = rollout.name == "native" and dtype == "float32"
        if one_update and is_exact and not self.config.algorithm.use_kl_in_reward:
            return None
        return self._infer(self.actor_rollout_wg, "compute_log_prob", batch)

    def compute_ref_log_probs(self, batch: DataProto) -> Later | None:
        """Log-probs under the reference, where a KL term needs them."""
        return self._infer(self.ref_policy_wg, "compute_ref_log_prob", batch) if self.use_reference else None

    def compute_values(self, batch: DataProto) -> Later | None:
        """The critic's values, where there is a critic."""
        return self._infer(self.critic_wg, "compute_values", batch) if self.use_critic else None

    def score(self, batch: DataProto, *, validation: bool = False) -> PendingScores | None:
        """Token-level scores: rules in processes of their own, the reward model on its pool. None if they are there."""
        if "token_level_scores" in batch.batch:
            return None
        by_model = self.config.reward_model.validate or not validation
        rm_wg = self.rm_wg if by_model else None
        return self._issued(self.scoring.issue(batch, self.reward_wg, rm_wg, validation=validation))

    def score_baselines(self, labels: DataProto, greedy: DataProtoFuture | None) -> Later | None:
        """The score of the greedy response to the same prompt, for each response."""
        if greedy is None:
            return None
        n = self.config.actor_rollout_ref.rollout.n
        prompts = labels.select(batch_keys=[])[::n]  # the batch of sampled responses was built on the labels
        scores = self.score(prompts.union(greedy.get()))

        def of_each_response() -> DataProto:
            totals = scores.get().batch["token_level_scores"].sum(dim=-1)
            self.log.metrics |= baseline_metrics(scores.info)
            return DataProto.from_dict(tensors={"reward_baselines": totals.repeat_interleave(n)})

        return Later(of_each_response)

    def join(self, batch: DataProto, *columns: DataProtoFuture | PendingScores | Later | None) -> DataProto:
        """Wait for columns and put them into the batch; meanwhile, a checkpoint of the step before is completed."""
        self.checkpoints.finish()
        for future in columns:
            if future is not None:
                batch = batch.union(future.get())
            if isinstance(future, PendingScores):
                self.log.add_scores(future.info, self.scoring.metrics(self.scoring.sources(batch), future.info))
        return batch

    def compute_advantages(self, batch: DataProto) -> DataProto:
        """Rewards (less the KL penalty, if asked), then advantages and returns.

        A number that is not finite ends the run, or leaves the step out: then nothing that outlasts the step changes.
        """
        algorithm = self.config.algorithm
        with self.log.phase("adv"):
            if self._is_left_out(batch, self._answers):
                return batch
            if not self.config.actor_rollout_ref.rollout.trust_log_probs:
                self.log.metrics |= rollout_mismatch(batch)
            if algorithm.use_kl_in_reward:
                batch, kl_metrics = subtract_kl(batch, self.kl_ctrl.value, algorithm.kl_penalty)
                self.log.metrics |= kl_metrics
            else:
                scores = batch.batch["token_level_scores"]
                batch = batch.union(DataProto.from_dict(tensors={"token_level_rewards": scores}))
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            )
            self._is_left_out(batch, ("token_level_rewards", "advantages", "returns"))
            return batch

    @property
    def _answers(self) -> list[str]:
        """Columns of models and graders that the step rests on, where it has them."""
        corrects = self.config.actor_rollout_ref.actor.tis_imp_ratio_cap > 0
        return [*ANSWERS, *(["rollout_log_probs"] if corrects else [])]

    def _is_left_out(self, batch: DataProto, names: Sequence[str]) -> bool:
        """Whether a column is not finite, so that this step updates nothing; an error if the run is to stop then."""
        broken = nonfinite_places(batch, names)
        if not broken:
            return False
        problem = "; ".join(
            f"{name} is not finite at {int(places.sum())} of {places.numel()} places, the first in row "
            f"{int(places.nonzero()[0][0])}"
            for name, places in broken.items()
        )
        problem = f"step {self.global_step}: {problem}"
        if self.config.trainer.on_nonfinite == "stop":
            raise NonFiniteError(f"{problem}; nothing was updated. trainer.on_nonfinite=skip leaves such steps out.")
        logger.warning("%s; this step updates nothing", problem)
        counts = {f"training/nonfinite/{name}": float(places.sum()) for name, places in broken.items()}
        self.log.metrics |= {"training/skipped_step": 1.0, **counts}
        self._left_out = self.global_step
        return True

    def update_critic(self, batch: DataProto) -> DataProtoFuture | None:
        """Fit the values to the returns."""
        if not self.use_critic or self._left_out == self.global_step:
            return None
        columns = [*MODEL_INPUTS, "values", "returns"]
        dealt = self._deal(batch, columns, critic_config(self.config), self.critic_wg)
        return self._issued(self.critic_wg.update_critic(dealt), is_update=True)

    def update_actor(self, batch: DataProto) -> DataProtoFuture | None:
        """Improve the policy, also where it generates; not while the critic warms up."""
        if self.global_step < self.config.trainer.critic_warmup or self._left_out == self.global_step:
            return None
        actor = self.config.actor_rollout_ref.actor
        columns = [*MODEL_INPUTS, "advantages"]
        columns += ["old_log_probs"] if "old_log_probs" in batch.batch else []
        columns += ["ref_log_prob"] if actor.use_kl_loss else []
        columns += ["rollout_log_probs"] if actor.tis_imp_ratio_cap > 0 else []
        dealt = self._deal(batch, columns, actor, self.actor_rollout_wg)
        update = self._issued(self.actor_rollout_wg.update_actor(dealt), is_update=True)
        self.send_weights()
        return update

    def send_weights(self) -> None:
        """Bring the policy to a rollout on other devices. That runs beside the critic's update, or behind it where the
        critic has these devices too."""
        if self.rollout_wg is None:
            return
        buckets = [self.actor_rollout_wg.send_weights(bucket) for bucket in range(self._num_weight_buckets)]
        self._issued(self.rollout_wg.receive_weights(*buckets), is_update=True)

    def _issued(self, future: Any, *, is_update: bool = False) -> Any:
        """With less than full overlap, what was issued must end before the next call."""
        overlap = self.config.trainer.overlap
        if overlap == "none" or (overlap == "updates" and not is_update):
            future.get()
        return future

    def _infer(self, group: RayWorkerGroup, method: str, batch: DataProto) -> Later:
        """A data-parallel call on the model inputs, with rows dealt so that all devices have the same work."""
        inputs = batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=[])
        if not self.config.trainer.balance_batch or group.world_size == 1:
            future = self._issued(getattr(group, method)(inputs))
            return Later(future.get)
        lengths = inputs.batch["attention_mask"].sum(dim=-1).numpy()
        base, extra = divmod(len(inputs), group.world_size)
        order = balanced_order(lengths, [base + (shard < extra) for shard in range(group.world_size)])
        future = self._issued(getattr(group, method)(inputs[order]))
        return Later(lambda: future.get()[np.argsort(order)])

    def _mini_batch_rows(self, section: Any) -> int:
        return section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def _deal(self, batch: DataProto, columns: list[str], section: Any, group: RayWorkerGroup) -> DataProto:
        return deal_mini_batches(
            batch.select(batch_keys=columns, non_tensor_batch_keys=[], meta_info_keys=[]),
            rows_per_mini_batch=self._mini_batch_rows(section),
            num_shards=group.world_size,
            epochs=section.ppo_epochs,
            shuffle_seed=[self.config.trainer.seed, self.global_step] if section.shuffle else None,
            balance=self.config.trainer.balance_batch,
        )

    # -------------------------------------------------------------------------------------- the end of a step

    def end_step(
        self, batch: DataProto, critic_update: DataProtoFuture | None, actor_update: DataProtoFuture | None
    ) -> None:
        """Validate and save what is due. The updates may go on: the step is closed when the next rollout was issued."""
        trainer = self.config.trainer
        epoch = self.train_dataloader.state_dict()["epoch"]
        self._open_step = OpenStep(self.global_step, epoch, batch, (critic_update, actor_update))
        if trainer.overlap != "full":
            self._wait_for_updates()
        if self.val_dataloader is not None and self._is_due(trainer.test_freq):
            self.validate()
        self._stopping = self._stop_file.exists()
        if self._stopping:
            logger.warning("ending after step %d, as the file %s asks", self.global_step, self._stop_file)
            self._stop_file.unlink()
        if self._is_last:
            self.close_step()
        if self._is_due(trainer.save_freq) or self._stopping:
            self.checkpoints.begin()
        if self._is_last:
            self.checkpoints.finish()

    def _wait_for_updates(self) -> dict[str, float]:
        """The metrics of the open step's updates."""
        updates = [update.get()[0] for update in self._open_step.updates if update is not None]
        return {name: value for metrics in updates for name, value in metrics.items()}

    def close_step(self) -> None:
        """Wait for the updates of the open step, if there is one, and write its line."""
        self.checkpoints.follow()
        step = self._open_step
        if step is None:
            return
        self.log.metrics |= self._wait_for_updates()
        self._open_step = None
        self._follow_kl(step)
        self.log.metrics |= {"training/global_step": step.number, "training/epoch": step.epoch}
        self.log.write_step(
            step.number,
            step.batch,
            tokenizer=self.tokenizer,
            use_critic=self.use_critic,
            devices=self.resource_pool_manager.get_n_gpus(),
        )

    def _follow_kl(self, step: OpenStep) -> None:
        """Move the KL coefficient; not after a step, or an optimizer step of it, that was left out."""
        metrics = self.log.metrics
        skipped = any(metrics.get(f"{role}/skipped_updates") for role in ("actor", "critic"))
        if self.config.algorithm.use_kl_in_reward and not skipped and self._left_out != step.number:
            move_kl_coefficient(step.batch, self.kl_ctrl, metrics)

    def _save_what_is_complete(self) -> None:
        """After an error: the step before may lack nothing but its line, and its checkpoint the last file."""
        try:
            with limited_wait(SAVE_SECONDS):  # ranks may be stuck in a collective with the one that failed
                self.close_step()
                self.checkpoints.finish()
        except Exception as error:
            logger.warning("the last step is not in the metrics, or not saved: %s", error)

    @property
    def _is_last(self) -> bool:
        """Whether no step follows: the run is complete, or was asked to end here."""
        return self._stopping or self.global_step >= self.total_training_steps

    def _is_due(self, every: int | None) -> bool:
        """Every so many steps, and at the end; None is only at the end, -1 never."""
        if every == -1:
            return False
        at_end = self.global_step >= self.total_training_steps
        return at_end or (every is not None and self.global_step % every == 0)

    def validate(self) -> None:
        """Add validation metrics of the policy as it is now to those of the step."""
        with self.log.validating(len(self.val_dataloader.dataset)):
            self.log.metrics |= validate(self, self.val_dataloader)
