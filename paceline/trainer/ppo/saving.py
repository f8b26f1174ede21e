"""Saving and resuming a run: what the driver and every role need to go on as if nothing had happened."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, StorageError, WorkerError
from paceline.files import keep_old, storage_errors_in_words
from paceline.protocol import DataProtoFuture
from paceline.run_folder import ACTOR, CHECKPOINTS_FOLDER, CRITIC, STATE, latest_step
from paceline.trainer.ppo.checkpoint import (
    abandon_checkpoint,
    begin_checkpoint,
    complete_checkpoint,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
    require_intact,
    rewind,
)
from paceline.trainer.ppo.roles import Role, role_name

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


@dataclass
class _Unfinished:
    """A checkpoint that workers are writing, in a folder with a temporary name."""

    folder: Path
    state: dict[str, Any]
    saving: list[DataProtoFuture]
    writing: list[DataProtoFuture] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run.

    `begin` lets every role take a copy of its state, after the updates that were issued before; the files are written
    behind the next rollout. `follow`, called when that rollout was issued, makes the roles wait for their files;
    `finish` waits for all, and only then is the checkpoint complete.
    """

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self.trainer = trainer
        self.folder = trainer.run_dir / CHECKPOINTS_FOLDER
        self._unfinished: _Unfinished | None = None

    def begin(self) -> None:
        """Save everything that the next step depends on."""
        trainer = self.trainer
        state = {
            "global_step": trainer.global_step,
            "dataloader": trainer.train_dataloader.state_dict(),
            "data_files": trainer.data_files.at_start,
        }
        trainer.data_files.warn_of_changes()
        with trainer.log.phase("save_checkpoint"), self._failures_in_words(trainer.global_step):
            folder = begin_checkpoint(self.folder, trainer.global_step)
            saving = []
            for name, group in self._saved_groups().items():
                (folder / name).mkdir()
                saving.append(group.save_checkpoint(str((folder / name).resolve())))
            trainer.tokenizer.save_pretrained(folder / ACTOR)
        self._unfinished = _Unfinished(folder, state, saving)

    def follow(self) -> None:
        """Let the roles wait for their files, after the calls that were issued before."""
        if self._unfinished is not None and not self._unfinished.writing:
            groups = self._saved_groups().values()
            with self._failures_in_words(self._unfinished.state["global_step"]):
                self._unfinished.writing = [group.finish_checkpoint() for group in groups]

    def finish(self) -> None:
        """Wait until the checkpoint that was begun, if any, is complete on disk."""
        self.follow()
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return
        step = unfinished.state["global_step"]
        with self.trainer.log.phase("save_checkpoint"), self._failures_in_words(step):
            for future in (*unfinished.saving, *unfinished.writing):
                future.get()
            # Now, and not when it was begun: the coefficient moves when the updates of its step have ended.
            state = {**unfinished.state, "kl_ctrl": self.trainer.kl_ctrl.state_dict()}
            complete_checkpoint(unfinished.folder, state)
            config = self.trainer.config.trainer
            prune_checkpoints(self.folder, config.max_actor_ckpt_to_keep, config.max_critic_ckpt_to_keep)

    @contextmanager
    def _failures_in_words(self, step: int) -> Iterator[None]:
        """A checkpoint that the disk refuses leaves nothing behind, and the one before it in force."""
        try:
            with storage_errors_in_words(self.folder):
                yield
        except (StorageError, WorkerError) as error:
            if isinstance(error, WorkerError) and not error.caused_by(StorageError):
                raise
            cause = error.remote_cause.message if isinstance(error, WorkerError) else str(error)
            self._unfinished = None
            abandon_checkpoint(self.folder, step)
            last = latest_step(self.folder)
            kept = "There is no checkpoint before it." if last is None else f"The last checkpoint is of step {last}."
            raise StorageError(f"the checkpoint of step {step} was not saved: {cause} {kept}") from None

    def resume(self) -> bool:
        """Load the checkpoint that the config names. True if it is of this run, whose records then go on."""
        trainer, config = self.trainer, self.trainer.config.trainer
        if config.resume_mode == "disable":
            if not config.val_only:
                keep_old(self.folder)
            return False
        if config.resume_mode == "resume_path":
            folder: Path | None = Path(str(config.resume_from_path)).expanduser()
            require_intact(folder)
        else:
            folder = latest_checkpoint(self.folder, repair=not config.val_only)
        if folder is None:
            return False
        state = read_state(folder)
        if lacking := [name for name in ("dataloader", "kl_ctrl") if not isinstance(state.get(name), dict)]:
            raise CheckpointError(f"{folder} is no complete checkpoint: {STATE} has no {' and no '.join(lacking)}.")
        position = trainer.data_files.position_after(state, trainer.train_dataloader.state_dict())
        groups = self._saved_groups()
        missing = [name for name in (ACTOR, CRITIC) if name in groups and not (folder / name).is_dir()]
        if missing:
            raise CheckpointError(
                f"{folder} has no {' and no '.join(missing)}: it was saved by a run with other roles. Resume it with "
                f"the algorithm.adv_estimator that it was trained with, or set trainer.resume_mode=disable."
            )
        loading = [
            group.load_checkpoint(str((folder / name).resolve()))
            for name, group in groups.items()
            if (folder / name).is_dir()
        ]
        for future in loading:
            future.get()
        trainer.global_step = state["global_step"]
        trainer.train_dataloader.load_state_dict(position)
        trainer.kl_ctrl.load_state_dict(state["kl_ctrl"])
        logger.info("resumed from %s at step %d of %d", folder, trainer.global_step, trainer.total_training_steps)
        if trainer.global_step >= trainer.total_training_steps:
            logger.warning(
                "this run is complete; set trainer.total_training_steps higher, or trainer.resume_mode=disable."
            )
        if config.val_only:  # only a look: whatever is in the run's folder stays as it is
            return False
        if os.path.dirname(os.path.realpath(folder)) != os.path.realpath(
            self.folder
        ):  # another run's: this folder's records begin here
            keep_old(self.folder)
            return False
        rewind(self.folder, folder)
        return True

    def _saved_groups(self) -> dict[str, RayWorkerGroup]:
        """By folder: every role that has a state. Frozen ones have none but their random numbers."""
        names = dict.fromkeys((Role.ActorRollout, Role.ActorRolloutRef), ACTOR)
        return {
            names.get(role, role_name(role)): group
            for role, group in self.trainer.worker_groups.items()
            if hasattr(group, "save_checkpoint")
        }
