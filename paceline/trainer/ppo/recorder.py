"""The flight recorder: bundles of whole steps, and the alarms of steps that are far from the run.

A bundle holds what the driver had of a step and what the updates said of themselves. Weights are not copied at every
step: they follow from the bundle before, from a checkpoint, or from the models that the run began with. Where none of
these is there, the bundle has them as they were before the step.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline import __version__
from paceline.config import PPOConfig
from paceline.config.load import to_dict
from paceline.config.secrets import without_secrets
from paceline.files import append_whole, keep_old, write_atomically
from paceline.protocol import DataProto, DataProtoFuture
from paceline.report.anomalies import Anomalies
from paceline.report.bundles import (
    BASE,
    adopt_base,
    bundle_name,
    list_bundles,
    read_manifest,
    unfinished_bundle,
    write_bundle,
)
from paceline.report.json_lines import Row, json_line, row_of_step
from paceline.run_folder import ALARMS_FILE, RECORDS_FOLDER
from paceline.single_controller.ray import RayWorkerGroup
from paceline.trainer.ppo.saving import Checkpoints
from paceline.trainer.ppo.step import Step

logger = logging.getLogger(__name__)

LONGEST_CHAIN = 50
"""Of an on_anomaly recorder: after so many steps without a checkpoint, a bundle takes the weights along."""
KEPT_BEHIND = 3
"""Of it: so many steps lead to the one that is unusual, at least."""


class Describes(Protocol):
    """A worker group whose workers can say what their last update did."""

    def describe_update(self) -> DataProtoFuture: ...


class Recorder:
    """Of one run. `begin` and `close` are called for each step, `note_update` where an update was issued."""

    def __init__(
        self, cfg: PPOConfig, run_dir: Path, checkpoints: Checkpoints, facts: Row, first_step: int, *, continues: bool
    ) -> None:
        self._cfg = cfg
        self._asked = cfg.trainer.record
        self._records = run_dir / RECORDS_FOLDER
        self._alarms = run_dir / ALARMS_FILE
        self._checkpoints = checkpoints
        self._facts = facts
        self._start = first_step
        self._follows: dict[int, str] = {}
        """Of the steps that are being recorded: what their weights follow from."""
        self._saving: list[DataProtoFuture] = []
        self._chain = 0
        self._ring: list[tuple[int, str]] = []
        self._anomalies = Anomalies()
        if continues:
            self._go_on(first_step)
        else:  # what is there is of an earlier run
            keep_old(self._records)
            keep_old(self._alarms)

    def _go_on(self, first_step: int) -> None:
        """After a resume: steps that come again go; of an on_anomaly recorder, the others may still be pruned."""
        for step, folder in list_bundles(self._records).items():
            if step > first_step:
                shutil.rmtree(folder)
            elif self._asked == "on_anomaly":
                manifest = read_manifest(folder)
                self._ring = [] if manifest["alarms"] else [*self._ring, (step, manifest["follows"])]
        if self._alarms.exists():
            lines = self._alarms.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if (row := row_of_step(line)) is not None and row["step"] <= first_step]
            write_atomically(self._alarms, b"".join(kept))

    def wants(self, step: int) -> bool:
        """Whether this step is recorded."""
        return step in self._asked if isinstance(self._asked, list) else self._asked != "never"

    def begin(self, step: Step, foreign: Path | None) -> None:
        """Before the updates of a step. `foreign` is the checkpoint of another run that this one began with."""
        if not self.wants(step.number):
            return
        step.recorded = {}
        number = step.number
        follows = self._find_weights(number, foreign)
        self._chain = self._chain + 1 if follows == "step" else 0
        self._follows[number] = follows
        if follows == BASE:
            folder = unfinished_bundle(self._records / bundle_name(number)) / BASE
            shutil.rmtree(folder.parent, ignore_errors=True)
            self._saving = self._checkpoints.save_roles(folder)

    def _find_weights(self, step: int, foreign: Path | None) -> str:
        is_first = step == self._start + 1
        has_previous = step - 1 in self._follows or (self._records / bundle_name(step - 1)).is_dir()
        saved = self._checkpoints.folder_of(step - 1)
        if is_first and foreign is not None:
            return f"checkpoint {foreign.resolve()}"
        if self._asked == "on_anomaly" and saved is not None:
            return f"checkpoint {saved.resolve()}"
        if has_previous and not (self._asked == "on_anomaly" and self._chain >= LONGEST_CHAIN):
            return "step"
        if saved is not None:
            return f"checkpoint {saved.resolve()}"
        return "start" if step == 1 else BASE

    @staticmethod
    def note_update(step: Step, role: str, group: RayWorkerGroup) -> None:
        """An update was issued: the workers say what it did, behind it."""
        if step.recorded is not None and hasattr(group, "describe_update"):
            step.recorded[role] = group.describe_update()

    def close(self, step: Step, metrics: Mapping[str, object], kl_coefficient: float) -> None:
        """A step is complete: look whether it is unusual, and write its bundle."""
        unusual = self._anomalies.look(metrics)
        if unusual:
            logger.warning("step %d is unusual: %s", step.number, "; ".join(unusual))
            self._alarms.parent.mkdir(parents=True, exist_ok=True)
            with self._alarms.open("ab", buffering=0) as file:
                append_whole(file, json_line({"step": step.number, "alarms": unusual}))
        if step.recorded is not None:
            self._write(step, kl_coefficient, unusual)
            self._prune(step.number, bool(unusual))

    def fail(self, step: Step | None, error: Exception, kl_coefficient: float) -> None:
        """The run ends in this step: keep what there is of it, and what leads to it."""
        if step is not None and step.recorded is not None and step.batch.batch is not None:
            step.recorded = {}  # what updates would say of themselves may never come
            self._write(step, kl_coefficient, [f"{type(error).__name__}: {error}"], failed=True)
            self._prune(step.number, is_unusual=True)

    def _write(self, step: Step, kl_coefficient: float, unusual: list[str], *, failed: bool = False) -> None:
        assert step.recorded is not None
        for future in self._saving:
            future.get()
        self._saving = []
        follows = self._follows[step.number]
        updates = {role: future.get() for role, future in step.recorded.items()}
        manifest = {
            "step": step.number,
            "paceline": __version__,
            "torch": torch.__version__,
            "version": step.version,
            "follows": follows,
            "kl_coefficient": kl_coefficient,
            "left_out": step.is_left_out,
            "failed": failed,
            "alarms": unusual,
            "updates": {role: told[0] for role, told in updates.items()},
            "metrics": step.metrics,
            "config": without_secrets(to_dict(self._cfg)),
            **self._facts,
        }
        folder = self._records / bundle_name(step.number)
        write_bundle(folder, manifest, step.batch, extras_of(step))
        if isinstance(self._asked, list) and follows.startswith("checkpoint "):
            adopt_base(folder, Path(follows.removeprefix("checkpoint ")))
        for older in [number for number in self._follows if number < step.number - 1]:
            del self._follows[older]

    def _prune(self, step: int, is_unusual: bool) -> None:
        """Of an on_anomaly recorder: keep what leads to an unusual step, else what the next one would follow from."""
        if self._asked != "on_anomaly":
            return
        self._ring.append((step, self._follows[step]))
        if is_unusual:
            for number, follows in self._ring:
                if follows.startswith("checkpoint "):  # it may be pruned
                    adopt_base(self._records / bundle_name(number), Path(follows.removeprefix("checkpoint ")))
            self._ring = []
            return
        starts = [place for place, (_, follows) in enumerate(self._ring) if follows != "step"]
        while starts and len(self._ring) - starts[-1] < KEPT_BEHIND:
            starts.pop()
        for number, _ in self._ring[: starts[-1] if starts else 0]:
            shutil.rmtree(self._records / bundle_name(number), ignore_errors=True)
        self._ring = self._ring[starts[-1] if starts else 0 :]


def extras_of(step: Step) -> dict[str, Any]:
    """What a step has beside its batch: requests with their seeds, greedy responses, orders of rows."""
    requests = step.requests
    extras: dict[str, Any] = {"requests": dict(requests.batch.items()) if requests.batch is not None else {}}
    extras["sampling"] = dict(requests.meta_info.get("sampling", {}))
    if step.greedy is not None:
        greedy: DataProto = step.greedy.get()
        extras["greedy"] = {"tensors": dict(greedy.batch.items())}
    if step.rows_to_train is not None:
        extras["rows_to_train"] = step.rows_to_train
    extras["order"] = dict(step.order)
    return extras
