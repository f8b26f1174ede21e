"""A recorded step once more, in this process and without Ray: the trainer's own phases on the columns of a bundle.

What comes out is compared with what was recorded, in the order in which a step makes it: scores, rewards, advantages,
the metrics of each optimizer step, weights. The weights before the step come from the bundle itself, from a checkpoint,
or from the models that the run began with, and then through the bundles between.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.config import PlacementConfig, PPOConfig, ScheduleConfig
from paceline.config.load import load_config
from paceline.errors import CheckpointError, NonFiniteError
from paceline.external import import_external
from paceline.protocol import DataProto, DataProtoFuture
from paceline.report.bundles import Bundle, bundle_name, read_bundle
from paceline.report.differing import same_value, tensor_difference, update_differences
from paceline.report.json_lines import plain
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, make_reward_fn
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.step import Step
from paceline.workers.reward_worker import EXTRA_INFO

logger = logging.getLogger(__name__)

Stage = Literal["reward", "advantage", "loss", "gradient"]
STAGES: tuple[Stage, ...] = ("reward", "advantage", "loss", "gradient")
REWARD_COLUMNS = ("token_level_scores",)
ADVANTAGE_COLUMNS = ("token_level_rewards", "rollout_is_weights", "loss_mask", "advantages", "returns")


@dataclass
class Outcome:
    """What a replay found."""

    differences: list[str] = field(default_factory=list)
    """In the order of the step; the first is where it parts from the record."""
    compared: list[str] = field(default_factory=list)
    is_exact: bool = True
    batch: DataProto | None = None
    """As replayed."""


class NoLog:
    """The records of a run that keeps none."""

    def phase(self, name: str, **about: object) -> nullcontext[None]:
        del name, about
        return nullcontext()

    def calls_of(self, step: int, version: int) -> nullcontext[None]:
        del step, version
        return nullcontext()


class RecordedPrompts:
    """As many prompts as the run had: learning-rate schedules count them. None is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise IndexError(row)


def chain_to(bundle: Bundle) -> list[Bundle]:
    """The bundles that lead to this one's weights, oldest first, itself last."""
    chain = [bundle]
    while chain[0].base is None and chain[0].manifest["follows"] == "step":
        step = chain[0].step - 1
        folder = chain[0].folder.with_name(bundle_name(step))
        if not folder.is_dir():
            raise CheckpointError(f"the weights before step {step + 1} follow from {folder}, which is not there.")
        chain.insert(0, read_bundle(folder))
    return chain


SHARED_BY_RANKS = ("ulysses_sequence_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
"""Keys that one process can't follow."""


def in_one_process(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which nothing is shared by several ranks.

    >>> in_one_process({"actor": {"megatron": {"tensor_model_parallel_size": 2}}, "seed": 3})
    {'actor': {'megatron': {'tensor_model_parallel_size': 1}}, 'seed': 3}
    """
    return {
        name: 1 if name in SHARED_BY_RANKS else in_one_process(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
    }


def replay_config(manifest: Mapping[str, Any], overrides: Mapping[str, Any], run_dir: Path) -> PPOConfig:
    """The configuration of the run, for one process that samples nothing."""
    from omegaconf import OmegaConf

    tree = OmegaConf.create(in_one_process(manifest["config"]))
    for key, value in overrides.items():
        OmegaConf.update(tree, key, value)
    cfg = load_config(tree)
    trainer, rollout = cfg.trainer, cfg.actor_rollout_ref.rollout
    placed = trainer.placement
    pools = (2 if placed.name == "split" else 1) + (placed.rollout_devices is not None)
    trainer = replace(
        trainer,
        nnodes=1,
        n_gpus_per_node=pools,
        placement=PlacementConfig(placed.name, rollout_devices=1 if placed.rollout_devices else None),
        schedule=ScheduleConfig(),
        total_training_steps=manifest["total_steps"],
        default_local_dir=str(run_dir),
        resume_mode="disable",
        resume_from_path=None,
        record="never",
        overlap="none",
    )
    rollout = replace(
        rollout,
        name="native",
        load_format="auto",
        weight_transfer="object_store",  # a broadcast wants two calls at a time
        agent=replace(rollout.agent, num_workers=1),
    )
    return replace(
        cfg,
        trainer=trainer,
        distillation=replace(cfg.distillation, n_gpus_per_node=0, nnodes=0),
        actor_rollout_ref=replace(cfg.actor_rollout_ref, rollout=rollout),
        reward_model=replace(cfg.reward_model, num_workers=1, enable_resource_pool=False),
        data=replace(cfg.data, val_files=None, sampler=type(cfg.data.sampler)()),
    )


class Replay:
    """The replay of one step. `overrides` ask what would have been."""

    def __init__(self, folder: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.bundle = read_bundle(folder)
        self.manifest = self.bundle.manifest
        self._overrides = overrides or {}
        told = self.manifest["updates"].values()
        self.is_exact = all(update["ranks"] == 1 for update in told)
        self._scratch = tempfile.TemporaryDirectory(prefix="paceline-replay-")
        cfg = replay_config(self.manifest, self._overrides, Path(self._scratch.name))
        threads = [update["threads"] for update in told] or [cfg.trainer.threads_per_worker or 0]
        if threads[0]:
            torch.set_num_threads(threads[0])
        import_external(cfg.actor_rollout_ref.model.external_lib)
        self.cfg = cfg
        self.trainer: RayPPOTrainer | None = None
        self._row: int | None = None

    def close(self) -> None:
        self._scratch.cleanup()

    def start(self, *, trains: bool) -> None:
        """Build the trainer, and bring its roles to where they were before the step."""
        from paceline.data.tokenizer import load_tokenizer

        cfg, runner = self.cfg, TaskRunner()
        for add in (runner.add_actor_rollout_worker, runner.add_critic_worker, runner.add_ref_policy_worker):
            add(cfg)
        runner.add_reward_model_worker(cfg)
        runner.add_teacher_worker(cfg)
        model = cfg.actor_rollout_ref.model
        tokenizer = load_tokenizer(str(model.tokenizer_path or model.path), trust_remote_code=model.trust_remote_code)
        reward_fn = make_reward_fn(cfg, tokenizer, num_examine=0)
        self.trainer = RayPPOTrainer(
            cfg,
            tokenizer,
            runner.role_worker_mapping,
            runner.init_resource_pool_mgr(cfg),
            InProcessWorkerGroup,  # type: ignore[arg-type]  # it has the methods that the trainer calls
            reward_fn,
            reward_fn,
            train_dataset=RecordedPrompts(self.manifest["num_prompts"]),
        )
        classes = {
            getattr(role, "name", str(role)): cls.__qualname__ for role, cls in runner.role_worker_mapping.items()
        }
        if others := {role: cls for role, cls in self.manifest["workers"].items() if classes.get(role) != cls}:
            logger.warning("the run had worker classes of its own (%s); the replay has the usual ones", others)
        self.trainer.init_workers()
        self.trainer.log = NoLog()  # type: ignore[assignment]
        if trains:
            self._bring_weights()

    def _bring_weights(self) -> None:
        assert self.trainer is not None
        chain = chain_to(self.bundle)
        first = chain[0]
        follows = str(first.manifest["follows"])
        base = first.base or (Path(follows.removeprefix("checkpoint ")) if follows != "start" else None)
        if base is not None:
            if not base.is_dir():
                raise CheckpointError(f"the weights before step {first.step} are those of {base}, which is not there.")
            self.trainer.checkpoints.load_roles(base)
        for earlier in chain[:-1]:
            logger.info("step %d leads there", earlier.step)
            self._update(self._step(earlier, "loss"), None)

    def _step(self, bundle: Bundle, start: Stage) -> Step:
        """The step with what was recorded before `start`."""
        columns = bundle.columns
        dropped = {
            "reward": (*REWARD_COLUMNS, *ADVANTAGE_COLUMNS),
            "advantage": ADVANTAGE_COLUMNS,
        }.get(start, ())
        kept = [name for name in columns.batch.keys() if name not in dropped]  # noqa: SIM118 (a TensorDict)
        texts = [name for name in columns.non_tensor_batch if start != "reward" or name != EXTRA_INFO]
        batch = columns.select(batch_keys=kept, non_tensor_batch_keys=texts)
        step = Step(bundle.step, DataProto(), DataProto(), batch=batch, recorded={})
        step.version = bundle.manifest["version"]
        step.is_left_out = bool(bundle.manifest["left_out"])
        if start not in ("reward", "advantage"):
            step.rows_to_train = bundle.extras.get("rows_to_train")
        return step

    def run(self, start: Stage = "reward", row: int | None = None) -> Outcome:
        """Make the step again from `start` on, and compare; of columns the `row` alone, if one is named."""
        self._row = row
        self.start(trains=True)
        assert self.trainer is not None
        outcome = Outcome(is_exact=self.is_exact)
        step = self._step(self.bundle, start)
        trainer, recorded = self.trainer, self.bundle.columns
        trainer.global_step = step.number
        trainer.kl_ctrl.value = self.manifest["kl_coefficient"] if not self._sets("kl_ctrl") else trainer.kl_ctrl.value
        try:
            if start == "reward":
                scores = trainer.score(step.batch)
                assert scores is not None
                self._join(step, scores)
                self._compare_columns(outcome, step.batch, recorded, REWARD_COLUMNS)
            if start in ("reward", "advantage"):
                step.is_left_out = False
                trainer.compute_advantages(step)
                self._compare_columns(outcome, step.batch, recorded, ADVANTAGE_COLUMNS)
            self._update(step, outcome, with_losses=start != "gradient")
        except NonFiniteError as error:
            alarms = [str(alarm) for alarm in self.manifest["alarms"]]
            if not any(alarm.endswith(str(error)) for alarm in alarms):
                outcome.differences.append(f"the replay ends with: {error}")
            outcome.compared.append("the error that ended the run")
        outcome.batch = step.batch
        return outcome

    def _sets(self, part: str) -> bool:
        return any(part in key for key in self._overrides)

    @staticmethod
    def _join(step: Step, future: DataProtoFuture) -> None:
        answer = future.get()
        answer.meta_info.pop("metrics", None)
        step.batch = step.batch.union(answer)

    def _update(self, step: Step, outcome: Outcome | None, *, with_losses: bool = True) -> None:
        """Both updates; with an outcome, what they did is compared."""
        trainer = self.trainer
        assert trainer is not None
        assert step.recorded is not None
        trainer.global_step = step.number
        updates = [trainer.update_critic(step), trainer.update_actor(step)]
        for update in updates:
            if update is not None:
                update.get()
        if outcome is None:
            return
        recorded: dict[str, Any] = self.manifest["updates"]
        for role in ("critic", "actor"):
            # Several ranks had their rows one rank after another; mini-batches are of the same rows all the same.
            if self.is_exact and role in step.order and role in self.bundle.extras["order"]:
                self._compare(outcome, f"{role}: order of rows", step.order[role], self.bundle.extras["order"][role])
            if role in step.recorded and role in recorded:
                now = plain(step.recorded[role].get()[0])
                outcome.differences += update_differences(role, now, recorded[role], self._equal, with_losses)
                outcome.compared.append(f"{role}: {len(now['steps'])} optimizer steps, weights")
            elif (role in step.recorded) != (role in recorded) and not self.manifest["failed"]:
                outcome.differences.append(f"{role}: the run {'had' if role in recorded else 'had no'} update")

    def _compare_columns(self, outcome: Outcome, now: DataProto, recorded: DataProto, names: tuple[str, ...]) -> None:
        for name in names:
            if name in recorded.batch:
                shown = slice(None) if self._row is None else slice(self._row, self._row + 1)
                found = now.batch.get(name, None)
                part = found if found is None else found[shown]
                self._compare(outcome, name, part, recorded.batch[name][shown], first_row=self._row or 0)
            elif name in now.batch and not self.manifest["failed"]:
                outcome.differences.append(f"{name}: the run had no such column")

    def _compare(
        self, outcome: Outcome, name: str, now: torch.Tensor | None, recorded: torch.Tensor, first_row: int = 0
    ) -> None:
        outcome.compared.append(name)
        if difference := tensor_difference(name, now, recorded, exact=self.is_exact, first_row=first_row):
            outcome.differences.append(difference)

    def _equal(self, now: object, recorded: object) -> bool:
        return same_value(now, recorded, exact=self.is_exact)
