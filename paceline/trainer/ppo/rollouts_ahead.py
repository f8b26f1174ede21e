"""Steps whose responses are being sampled: the next one, and those ahead of it that the schedule allows.

`Schedule` decides; this draws the prompts, issues the rollouts, and brings both through a checkpoint. A checkpoint is
complete when it holds the responses of all rollouts that were issued before it: they can't be sampled again, for the
weights that sampled them are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from safetensors import SafetensorError

from paceline.data.loader import PromptLoader
from paceline.errors import CheckpointError, DataError
from paceline.files import storage_error
from paceline.protocol import DataProto, DataProtoFuture
from paceline.trainer.ppo.schedule import Schedule
from paceline.trainer.ppo.step import Step

logger = logging.getLogger(__name__)


class SavedRollout(TypedDict):
    """A step ahead of its turn, as a checkpoint describes it: `epoch` and `position` are those before its draw."""

    step: int
    version: int | None
    """Of the weights that sampled its responses; None if there are none yet."""
    epoch: int
    position: int
    size: NotRequired[int]
    """Of a streaming schedule: how many prompts this draw has."""
    left: NotRequired[list[int]]
    """Of a streaming schedule: the places of this draw that have not trained."""
    started: NotRequired[dict[str, int]]
    """Of those, by place: the groups that have ended, with the version of their oldest token."""


class RolloutsAhead:
    """The steps that were drawn and not yet closed. `draw` gives a step its prompts, `issue` has them answered."""

    def __init__(
        self, schedule: Schedule, loader: PromptLoader, draw: Callable[[int], Step], issue: Callable[[Step], None]
    ) -> None:
        self.schedule = schedule
        self._loader = loader
        self._draw = draw
        self._issue = issue
        self._steps: dict[int, Step] = {}
        self._taken: dict[int, Step] = {}

    def next_step(self) -> Step:
        """The next step, its rollout issued now or earlier; before it, all rollouts that are due are issued."""
        for number in self.schedule.due():
            step = self._steps.get(number) or self._draw(number)
            self._steps[number] = step
            step.version = self.schedule.issued(number)
            self._issue(step)
        sampled_by = self.schedule.take()
        step = self._steps.pop(self.schedule.step)
        assert step.version == sampled_by
        self._taken[step.number] = step
        return step

    def closed(self, step: Step) -> None:
        """The step has trained, and the ledger says so."""
        del self._taken[step.number]

    def before_new_weights(self) -> None:
        """Whoever samples now has begun before."""

    def look_after(self) -> None:
        """Calls of whole batches need nothing while the driver waits."""

    def new_weights(self) -> None:
        """An update of the actor was issued, with the weights for the rollout."""
        self.schedule.updated()

    def snapshot(self) -> AheadSnapshot:
        """What a checkpoint of this moment holds."""
        return AheadSnapshot([step for _, step in sorted(self._steps.items())])

    @property
    def num_prompts(self) -> int:
        """Drawn and not yet in the ledger, with those that the loader passed over before them."""
        return sum(step.num_prompts for step in (*self._taken.values(), *self._steps.values()))

    def queue(self) -> dict[str, int] | None:
        """How many prompts are ahead of the step that trains; None where none ever are. Another thread may ask."""
        return (
            {"ahead": sum(step.num_prompts for step in list(self._steps.values()))}
            if self.schedule.max_staleness
            else None
        )

    def load(self, saved: Sequence[SavedRollout], folder: Path, *, step: int, version: int) -> None:
        """Go on after `step`, with the responses that a checkpoint has of later ones.

        Prompts are drawn again from where they were; the position of the loader must be set after this.
        """
        sampled_by = {item["step"]: item["version"] for item in saved if item["version"] is not None}
        usable = self.schedule.resume(step, version, sampled_by)
        for item in saved:
            if len(item.get("left", ())) < item.get("size", 0):
                raise CheckpointError(
                    f"of the prompts of batch {item['step']} some have trained, and some have not: go on with "
                    "trainer.schedule.name=streaming, or start over with trainer.resume_mode=disable."
                )
            ahead = draw_again(item, self._loader, self._draw)
            self._steps[ahead.number] = ahead
            if ahead.number in usable:
                ahead.version = sampled_by[ahead.number]
                self._read(ahead, folder)
            else:
                logger.warning("step %d is sampled again: its responses would be too stale", ahead.number)

    @staticmethod
    def _read(step: Step, folder: Path) -> None:
        """Give a step the responses that a checkpoint has of it."""
        path, greedy = (responses_path(folder, step.number, kind) for kind in ("responses", "greedy"))
        step.responses = DataProtoFuture.of(load_responses(path, step.requests))
        if greedy.exists():
            step.greedy = DataProtoFuture.of(load_responses(greedy, step.requests))


class AheadSnapshot:
    """The steps ahead as a checkpoint holds them: `state` beside its other numbers, and the files of `write`."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self.state: list[SavedRollout] = [
            {
                "step": step.number,
                "version": None if step.responses is None else step.version,
                "epoch": step.before.epoch,
                "position": step.before.place,
            }
            for step in steps
        ]

    def write(self, folder: Path) -> None:
        """Wait for the responses of these steps and write them."""
        for step in self._steps:
            for kind, future in (("responses", step.responses), ("greedy", step.greedy)):
                if future is not None:
                    save_responses(future.get(), responses_path(folder, step.number, kind))


def responses_path(folder: Path, number: int, kind: str = "responses") -> Path:
    """The file of a step's, or a draw's, responses in a checkpoint."""
    return folder / f"step_{number}.{kind}.safetensors"


def save_responses(responses: DataProto, path: Path) -> None:
    try:
        responses.save_to_disk(path)
    except (OSError, SafetensorError) as error:  # safetensors does not pass the system's error on
        raise storage_error(path.parent, error) from error


def load_responses(path: Path, requests: DataProto) -> DataProto:
    """The responses in a file, which must be to these prompts, with one or more for each. Conversations may begin with
    prompts of their own, so of them the number alone must be that of the prompts."""
    try:
        responses = DataProto.load_from_disk(path)
    except (OSError, DataError) as error:
        raise CheckpointError(f"the responses of a step can't be read: {error}") from error
    prompts = requests.batch["input_ids"]
    if "conversation" in responses.batch:
        if int(responses.batch["conversation"].max()) + 1 != len(prompts):
            raise CheckpointError(f"{path} has the conversations of another number of prompts than the data have now.")
        return responses
    if not torch.equal(prompts[:: max(1, len(prompts) // len(responses))], responses.batch["prompts"]):
        raise CheckpointError(f"{path} has responses to other prompts than those that the data have now.")
    return responses


def draw_again(saved: SavedRollout, loader: PromptLoader, draw: Callable[[int], Step]) -> Step:
    """The prompts of a step ahead, from where they were drawn first. It leaves the loader there."""
    loader.load_state_dict({**loader.state_dict(), "epoch": saved["epoch"], "position": saved["position"]})
    return draw(saved["step"])
