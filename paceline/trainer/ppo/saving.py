"""Saving and resuming a run: what the driver and every role need to go on as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from paceline.algorithms.kl import KLController
from paceline.config import RunConfig, TrainerConfig
from paceline.data.changes import DataFiles
from paceline.data.loader import PromptLoader
from paceline.errors import CheckpointError, StorageError, WorkerError
from paceline.files import keep_old, readable_storage_errors
from paceline.protocol import DataProtoFuture
from paceline.run_folder import ACTOR, CRITIC, ROLLOUTS, STATE, can_be_resumed, checkpoint_name, latest_step
from paceline.trainer.ppo.checkpoint import (
    SavedState,
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
from paceline.trainer.ppo.rollouts_ahead import AheadSnapshot, RolloutsAhead
from paceline.trainer.ppo.streamed_rollouts import StreamedRollouts, StreamSnapshot

if TYPE_CHECKING:
    from paceline.single_controller.ray import RayWorkerGroup


@dataclass
class _Unfinished:
    """A checkpoint that workers are writing, in a folder with a temporary name."""

    folder: Path
    state: SavedState
    ahead: AheadSnapshot | StreamSnapshot | None
    saving: list[DataProtoFuture]
    writing: list[DataProtoFuture] = field(default_factory=list)


class Resumed(NamedTuple):
    """A checkpoint that was loaded."""

    step: int
    folder: Path
    is_own: bool
    """Whether it is of the run that resumed, and not of another one."""
    begins_epoch_again: bool
    """Whether its place in the data means nothing any more, because the files have changed."""


class Checkpoints:
    """The checkpoints of one run.

    `begin` lets every role take a copy of its state, after the updates that were issued before; the files are written
    behind the next rollout. `follow`, called when that rollout was issued, makes the roles wait for their files;
    `finish` waits for all, with the rollouts that were issued ahead, and only then is the checkpoint complete. A run
    that samples nothing has neither `kl_ctrl` nor `rollouts`.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        worker_groups: Mapping[Enum, RayWorkerGroup],
        tokenizer: PreTrainedTokenizerBase,
        dataloader: PromptLoader,
        data_files: DataFiles,
        kl_ctrl: KLController | None = None,
        rollouts: RolloutsAhead | StreamedRollouts | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._worker_groups = worker_groups
        self._tokenizer = tokenizer
        self._dataloader = dataloader
        self._data_files = data_files
        self._kl_ctrl = kl_ctrl
        self._rollouts = rollouts
        self._unfinished: _Unfinished | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether a checkpoint was begun and not finished."""
        return self._unfinished is not None

    def folder_of(self, step: int) -> Path | None:
        """Of the checkpoint after a step: its folder, where it is complete or was begun; None without one."""
        folder = self.folder / checkpoint_name(step)
        begun = self._unfinished is not None and self._unfinished.state["global_step"] == step
        return folder if begun or can_be_resumed(folder) else None

    def save_roles(self, folder: Path) -> list[DataProtoFuture]:
        """Save every role in a folder of its own there, as in a checkpoint; complete when the futures are."""
        groups = self._saved_groups()
        for name in groups:
            (folder / name).mkdir(parents=True)
        saving = [group.save_checkpoint(str((folder / name).resolve())) for name, group in groups.items()]
        return [*saving, *(group.finish_checkpoint() for group in groups.values())]

    def load_roles(self, folder: Path) -> None:
        """Bring every role to the state that it has there."""
        groups = self._saved_groups().items()
        loading = [
            group.load_checkpoint(str((folder / name).resolve())) for name, group in groups if (folder / name).is_dir()
        ]
        for future in loading:
            future.get()

    def begin(self, step: int) -> None:
        """Save everything that the step after this one depends on."""
        ahead = None if self._rollouts is None else self._rollouts.snapshot()
        state: SavedState = {
            "global_step": step,
            "dataloader": self._dataloader.state_dict(),
            "data_files": self._data_files.at_start,
        }
        if self._rollouts is not None and ahead is not None:
            state["version"], state["rollouts"] = self._rollouts.schedule.version, ahead.state
        self._data_files.warn_of_changes()
        with self._readable_failures(step):
            folder = begin_checkpoint(self.folder, step)
            saving = []
            for name, group in self._saved_groups().items():
                (folder / name).mkdir()
                saving.append(group.save_checkpoint(str((folder / name).resolve())))
            self._tokenizer.save_pretrained(folder / ACTOR)
        self._unfinished = _Unfinished(folder, state, ahead, saving)

    def follow(self) -> None:
        """Let the roles wait for their files, after the calls that were issued before."""
        if self._unfinished is not None and not self._unfinished.writing:
            groups = self._saved_groups().values()
            with self._readable_failures(self._unfinished.state["global_step"]):
                self._unfinished.writing = [group.finish_checkpoint() for group in groups]

    def finish(self) -> None:
        """Wait until the checkpoint that was begun, if any, is complete on disk."""
        self.follow()
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return
        with self._readable_failures(unfinished.state["global_step"]):
            for future in (*unfinished.saving, *unfinished.writing):
                future.get()
            if unfinished.ahead is not None:
                unfinished.ahead.write(unfinished.folder / ROLLOUTS)
            # Now, and not when it was begun: the coefficient moves when the updates of its step have ended.
            if self._kl_ctrl is not None:
                unfinished.state["kl_ctrl"] = self._kl_ctrl.state_dict()
            complete_checkpoint(unfinished.folder, unfinished.state)
            of_critic = self.config.max_critic_ckpt_to_keep if isinstance(self.config, TrainerConfig) else None
            prune_checkpoints(self.folder, self.config.max_actor_ckpt_to_keep, of_critic)

    @contextmanager
    def _readable_failures(self, step: int) -> Iterator[None]:
        """A checkpoint that the disk refuses leaves nothing behind, and the one before it in force."""
        try:
            with readable_storage_errors(self.folder):
                yield
        except (StorageError, WorkerError) as error:
            cause = str(error)
            if isinstance(error, WorkerError):
                if error.remote_cause is None or not error.caused_by(StorageError):
                    raise
                cause = error.remote_cause.message
            self._unfinished = None
            abandon_checkpoint(self.folder, step)
            last = latest_step(self.folder)
            kept = "There is no checkpoint before it." if last is None else f"The last checkpoint is of step {last}."
            raise StorageError(f"the checkpoint of step {step} was not saved: {cause} {kept}") from None

    def resume(self) -> Resumed | None:
        """Load the checkpoint that the config names, if there is one. With val_only, no file of the run changes."""
        config = self.config
        if config.resume_mode == "disable":
            if not config.val_only:
                keep_old(self.folder)
            return None
        if config.resume_mode == "resume_path":
            folder = Path(str(config.resume_from_path)).expanduser()
            require_intact(folder)
        elif latest := latest_checkpoint(self.folder, repair=not config.val_only):
            folder = latest
        else:
            return None
        step, begins_epoch_again = self._load(folder)
        is_own = os.path.dirname(os.path.realpath(folder)) == os.path.realpath(self.folder)
        if not config.val_only:
            if is_own:
                rewind(self.folder, folder)
            else:  # the records of this folder begin here
                keep_old(self.folder)
        return Resumed(step, folder, is_own, begins_epoch_again)

    def _load(self, folder: Path) -> tuple[int, bool]:
        """Bring roles, data, rollouts and KL coefficient to the state in `folder`.

        Returns its step, and whether the epoch begins again.
        """
        state = read_state(folder)
        wanted = ["dataloader"] if self._kl_ctrl is None else ["dataloader", "kl_ctrl"]
        if lacking := [name for name in wanted if not isinstance(state.get(name), dict)]:
            raise CheckpointError(f"{folder} is no complete checkpoint: {STATE} has no {' and no '.join(lacking)}.")
        position = self._data_files.position_after(state, self._dataloader.state_dict())
        groups = self._saved_groups()
        missing = [name for name in (ACTOR, CRITIC) if name in groups and not (folder / name).is_dir()]
        if missing:
            raise CheckpointError(
                f"{folder} has no {' and no '.join(missing)}: it was saved by a run with other roles. Resume it with "
                f"the algorithm.adv_estimator that it was trained with, or set trainer.resume_mode=disable."
            )
        self.load_roles(folder)
        if self._rollouts is not None:
            self._load_rollouts(self._rollouts, folder, state, drops=position != state["dataloader"])
        self._dataloader.load_state_dict(position)
        if self._kl_ctrl is not None:
            self._kl_ctrl.load_state_dict(state["kl_ctrl"])
        return state["global_step"], position != state["dataloader"]

    def _load_rollouts(
        self, rollouts: RolloutsAhead | StreamedRollouts, folder: Path, state: SavedState, *, drops: bool
    ) -> None:
        """The steps ahead. Where the data have changed, responses to the old ones go: the epoch begins again."""
        step = state["global_step"]
        assert isinstance(self.config, TrainerConfig)
        warming_up = max(0, self.config.critic_warmup - 1)
        version = state.get("version", max(0, step - warming_up))  # earlier versions of paceline did not save it
        ahead = [] if drops else state.get("rollouts", [])
        rollouts.load(ahead, folder / ROLLOUTS, step=step, version=version)

    def _saved_groups(self) -> dict[str, RayWorkerGroup]:
        """By folder: every role that has a state. Frozen ones have none but their random numbers."""
        return {
            ACTOR if role in (Role.ActorRollout, Role.ActorRolloutRef) else role_name(role): group
            for role, group in self._worker_groups.items()
            if hasattr(group, "save_checkpoint")
        }
