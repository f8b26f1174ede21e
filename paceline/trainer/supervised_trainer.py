"""Training on given texts: `train` is the loop; SupervisedTrainer is one run, with its state.

Devices, engines, checkpoints, records and placement are those of PPO; what is trained says an Objective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from paceline.config import SupervisedConfig
from paceline.config.derived import GLOBAL_POOL, num_devices, run_dir_of
from paceline.data.changes import DataFiles
from paceline.data.loader import PromptLoader
from paceline.data.text_rows import TextRows
from paceline.errors import ResourceError
from paceline.files import readable_storage_errors, replacing_folder
from paceline.protocol import DataProto, DataProtoFuture
from paceline.run_folder import CHECKPOINTS_FOLDER, MODEL_FOLDER, records_folder
from paceline.single_controller.base import call_tag
from paceline.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    limited_wait,
)
from paceline.trainer.device import detect_device
from paceline.trainer.objectives import Objective
from paceline.trainer.ppo.dealing import deal_mini_batches
from paceline.trainer.ppo.ray_trainer import SAVE_SECONDS
from paceline.trainer.ppo.roles import ResourcePoolManager, Role, role_name
from paceline.trainer.ppo.run_lock import run_lock
from paceline.trainer.ppo.saving import Checkpoints
from paceline.trainer.progress import RunProgress
from paceline.trainer.run_records import RunRecords
from paceline.workers.role_worker import RunContext

logger = logging.getLogger(__name__)


def train(trainer: SupervisedTrainer) -> None:
    """One optimizer step after the other; the files of a checkpoint are written behind the step that follows."""
    with trainer.run():
        for batch in trainer.batches():
            update = trainer.update(batch)
            trainer.end(batch, update)


class SupervisedTrainer:
    """One run: its data, its workers, its state."""

    def __init__(
        self,
        cfg: SupervisedConfig,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        group_cls: type[RayWorkerGroup] = RayWorkerGroup,
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.objective = objective
        self.group_cls = group_cls
        data, trainer = cfg.data, cfg.trainer
        self.data_files = DataFiles(data)
        assert data.train_files is not None  # the configuration was checked
        rows = objective.rows(data.train_files, tokenizer, data, data.train_max_samples)
        seed = trainer.seed if data.seed is None else data.seed
        self.loader = _loader(rows, data.train_batch_size, seed, shuffle=data.shuffle, drop_last=data.drop_last)
        self.val_loader: PromptLoader | None = None
        if data.val_files:
            held_out = objective.rows(data.val_files, tokenizer, data, data.val_max_samples)
            self.val_loader = _loader(held_out, data.val_batch_size, seed, shuffle=False, drop_last=False)
        self.run_dir = run_dir_of(trainer)
        self.records_dir = records_folder(self.run_dir, only_looks=trainer.val_only)
        last_step = trainer.total_training_steps or trainer.total_epochs * len(self.loader)
        self.progress = RunProgress(self.run_dir, last_step)
        nodes = [trainer.n_gpus_per_node] * trainer.nnodes
        self.pools = ResourcePoolManager({GLOBAL_POOL: nodes}, {Role.Actor: GLOBAL_POOL})
        self._processes: RayWorkerGroup | None = None

    def init_workers(self) -> None:
        """Start a process for each device, and load the model; if that fails, nothing is left behind."""
        with readable_storage_errors(self.records_dir), run_lock(self.records_dir):
            pass  # Another run in this folder is an error before models are loaded; `run` holds the lock.
        call_tag.set({"step": 0})
        try:
            self.workers = self._start_group()
            self.workers.init_model().get()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ResourceError):
                keys = "trainer.n_gpus_per_node, trainer.nnodes, trainer.cpus_per_device"
                raise ResourceError(f"{error}\nThe keys: {keys}; ray_kwargs.ray_init.num_cpus and address.") from None
            raise
        self.checkpoints = Checkpoints(
            self.run_dir / CHECKPOINTS_FOLDER,
            self.cfg.trainer,
            worker_groups={Role.Actor: self.workers},
            tokenizer=self.tokenizer,
            dataloader=self.loader,
            data_files=self.data_files,
        )

    def _start_group(self) -> Any:
        trainer, name = self.cfg.trainer, role_name(Role.Actor)
        device = trainer.device or detect_device()
        self.pools.create_resource_pool(
            nnodes=trainer.nnodes,
            device=device,
            cpus_per_device=trainer.cpus_per_device,
            threads_per_worker=trainer.threads_per_worker,
            wait_for_nodes_seconds=trainer.wait_for_nodes_seconds,
        )
        run = RunContext(
            seed=trainer.seed,
            device=device,
            total_optimizer_steps=self.progress.last_step,
            max_prompt_length=self.cfg.data.max_length,
            max_response_length=self.cfg.data.max_length,
            skip_nonfinite=trainer.on_nonfinite == "skip",
            collective_timeout_seconds=self.cfg.engine.nccl_timeout,
        )
        worker = RayClassWithInitArgs(self.objective.worker, config=self.cfg, role=name, run=run)
        self._processes = self.group_cls(
            resource_pool=self.pools.get_resource_pool(Role.Actor),
            ray_cls_with_init=create_colocated_worker_cls({name: worker}),
            heartbeat_timeout_seconds=trainer.heartbeat_timeout_seconds,
            wait=False,
        )
        role = self._processes.spawn(prefix_set={name})[name]
        self._processes.construct_workers()
        return role

    def shutdown(self) -> None:
        """Stop the workers and give their devices back."""
        if self._processes is not None:
            self._processes.shutdown()
        self._processes = None

    # ----------------------------------------------------------------------------------------------- the run

    def fit(self) -> None:
        """Train to the end."""
        train(self)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Resume or begin, validate first; at the end, however it comes, close the records and stop the workers."""
        trainer = self.cfg.trainer
        with ExitStack() as ending:
            ending.callback(self.shutdown)
            ending.enter_context(readable_storage_errors(self.records_dir))
            ending.enter_context(run_lock(self.records_dir))
            resumed = self.checkpoints.resume()
            if resumed is not None:
                self.progress.go_on_from(resumed.folder, resumed.step)
            continues = resumed is not None and resumed.is_own and not trainer.val_only
            role = role_name(Role.Actor)
            self.log = RunRecords(
                self.records_dir,
                self.cfg,
                resume_step=self.progress.step if continues else None,
                step=self.progress.step,
                total_steps=self.progress.last_step,
                pools=[GLOBAL_POOL],
                pool_of_role={role: GLOBAL_POOL},
                drain_call_records=self.group_cls.drain_call_records,
                running_calls=self.group_cls.running_calls,
            )
            with closing(self.log):
                try:
                    if self.val_loader is not None and (
                        trainer.val_only or (trainer.val_before_train and self.progress.step == 0)
                    ):
                        self.log.write_validation(self.validate())
                    yield
                    if not trainer.val_only and not self.progress.is_stopping:
                        self._write_model()
                except Exception as error:
                    self._save_what_is_complete()
                    self.log.end("failed", error)
                    raise
                self.log.end(self.progress.end)

    def batches(self) -> Iterator[DataProto]:
        """The rows of each step that is left."""
        while not (self.progress.is_last or self.cfg.trainer.val_only):
            self.progress.step += 1
            self.log.begin_step(self.progress.step)
            yield DataProto.from_single_dict(next(iter(self.loader)))

    def update(self, batch: DataProto) -> DataProtoFuture:
        """One optimizer step on all of the rows."""
        dealt = deal_mini_batches(
            batch,
            rows_per_mini_batch=len(batch),
            num_shards=self.workers.world_size,
            balance=self.cfg.trainer.balance_batch,
        )
        update = self.workers.update_model(dealt)
        self.checkpoints.follow()
        return update

    def end(self, batch: DataProto, update: DataProtoFuture) -> None:
        """Wait for the step; validate and save what is due; write its line."""
        step, trainer = self.progress.step, self.cfg.trainer
        metrics = dict(update.get()[0])
        self._finish_checkpoint()
        if self.val_loader is not None and self.progress.is_due(trainer.test_freq):
            metrics |= self.validate()
        stops = self.progress.look_for_stop()
        self._write_line(batch, metrics)
        if stops or self.progress.is_due(trainer.save_freq):
            with self.log.phase("save_checkpoint"):
                self.checkpoints.begin(step)
        if self.progress.is_last:
            self._finish_checkpoint()

    def _write_line(self, batch: DataProto, metrics: dict[str, float]) -> None:
        seconds, idle = self.log.step_seconds(self.progress.step)
        assert batch.batch is not None
        tokens = float(batch.batch["attention_mask"].sum())
        counts = {
            "training/global_step": self.progress.step,
            "training/epoch": self.loader.state_dict()["epoch"],
            "train/rows": len(batch),
            "train/trained_tokens": float(batch.batch["response_mask"].sum()),
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds["step"],
            "perf/throughput": tokens / (seconds["step"] * num_devices(self.cfg)),
        }
        timings = {f"timing_s/{name}": value for name, value in seconds.items()}
        self.log.write_line(self.progress.step, {**metrics, **counts, **timings, **idle})

    def validate(self) -> dict[str, float]:
        """Metrics of the held-out rows, of the model as it is now."""
        assert self.val_loader is not None
        parts: list[DataProto] = []
        with self.log.validating(len(self.val_loader.dataset)):
            for rows in self.val_loader:
                parts.append(self.workers.measure(DataProto.from_single_dict(rows)).get())
                self.log.validated(sum(map(len, parts)))
        columns = [part.batch for part in parts if part.batch is not None]
        measured = {name: torch.cat([part[name] for part in columns]) for name in columns[0].keys()}  # noqa: SIM118
        return self.objective.summarise(self.cfg, measured)

    def _write_model(self) -> None:
        """The model of the last step as a Hugging Face folder."""
        folder = self.run_dir / MODEL_FOLDER
        with self.log.phase("write_model"), replacing_folder(folder) as temporary:
            self.workers.export_model(str(temporary.resolve())).get()
            self.tokenizer.save_pretrained(temporary)
        logger.info("the trained model is in %s", folder)

    def _finish_checkpoint(self) -> None:
        if self.checkpoints.is_unfinished:
            with self.log.phase("save_checkpoint"):
                self.checkpoints.finish()

    def _save_what_is_complete(self) -> None:
        """After an error: a checkpoint may lack nothing but its last file."""
        try:
            with limited_wait(SAVE_SECONDS):  # ranks may be stuck in a collective with the one that failed
                self._finish_checkpoint()
        except Exception as error:
            logger.warning("the last checkpoint is not saved: %s", error)


def _loader(rows: TextRows[Any], batch_size: int, seed: int, *, shuffle: bool, drop_last: bool) -> PromptLoader:
    dataset: Any = rows  # whose items are no dicts, as those of prompts are
    return PromptLoader(dataset, batch_size, shuffle, seed, drop_last=drop_last, collate=dataset.collate)
