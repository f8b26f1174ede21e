"""One training step: what is asked of the rollout, and the record of what the step did."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paceline.data.loader import PromptLoader
from paceline.data.rl_dataset import Batch
from paceline.protocol import DataProto, DataProtoFuture
from paceline.report.ledger import DataPosition, Prompts, ranges
from paceline.schema import IMAGE_COLUMNS, REQUEST_COLUMNS


class Draw(NamedTuple):
    """Prompts that were drawn together, and for what; `skipped` are those that the loader passed over before them."""

    purpose: str
    before: DataPosition
    prompts: Prompts
    skipped: Prompts | None


START = DataPosition(0, 0)


@dataclass
class Step:
    """A step from its prompts to its line in the metrics.

    `labels` are the columns of the prompts that no model reads, a row for each response. `batch` grows from phase to
    phase. `updates` may still run when the next step begins; the step is closed when they have ended.
    """

    number: int
    requests: DataProto
    labels: DataProto
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each prompt, by the `uid` of its responses: its epoch, and its place in that."""
    skipped: list[Prompts] = field(default_factory=list)
    """What the loader passed over before its prompts."""
    before: DataPosition = START
    """Where the loader was before its first prompt."""
    version: int = 0
    """Of the weights that sample its responses."""
    responses: DataProtoFuture | None = None
    graded: DataProtoFuture | None = None
    """What the reward function said of them, where it was asked as they came."""
    greedy: DataProtoFuture | None = None
    """The most likely responses, where a baseline is made of them."""
    batch: DataProto = field(default_factory=DataProto)
    updates: list[DataProtoFuture] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    rows_to_train: np.ndarray | None = None
    """Row numbers of the batch that the updates train on, some of them several times; None: all of them once."""
    recorded: dict[str, DataProtoFuture] | None = None
    """By role, what the workers say of their updates; None: the flight recorder leaves this step out."""
    order: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of a recorded step, by role: the rows of the batch as they were dealt to its optimizer steps."""
    is_left_out: bool = False
    """Whether a number of it is not finite, so that it updates nothing."""

    def add(self, draw: Draw) -> None:
        """Prompts that were drawn for it."""
        epoch, first, stop = draw.prompts
        names = (group_name(draw.purpose, self.number, place) for place in range(stop - first))
        self.places |= {name: (epoch, first + place) for place, name in enumerate(names)}
        self.skipped += [draw.skipped] if draw.skipped is not None else []

    @property
    def epoch(self) -> int:
        """The newest of its prompts."""
        return max(epoch for epoch, _ in self.places.values())

    @property
    def num_prompts(self) -> int:
        """With those that the loader passed over."""
        return len(self.places) + sum(part.size for part in self.skipped)

    def accounted(self) -> tuple[list[Prompts], dict[str, list[Prompts]]]:
        """For the ledger, when the step is closed: prompts that trained, and by reason those that were dropped."""
        kept = set() if self.is_left_out else set(self.batch.non_tensor_batch["uid"])
        trained = [place for name, place in self.places.items() if name in kept]
        without = [place for name, place in self.places.items() if name not in kept]
        reason = "not_finite" if self.is_left_out else "filter_groups"
        return ranges(trained), {reason: ranges(without), "drop_last": self.skipped}


def draw_prompts(loader: PromptLoader, purpose: str) -> tuple[Batch, Draw]:
    """The rows of the next batch, and which they are."""
    before = position_of(loader)
    rows = next(iter(loader))
    after = position_of(loader)
    is_new = after.epoch > before.epoch
    num_prompts = loader.num_prompts
    skipped = Prompts(*before, num_prompts) if is_new and before.place < num_prompts else None
    return rows, Draw(purpose, before, Prompts(after.epoch, 0 if is_new else before.place, after.place), skipped)


def position_of(loader: PromptLoader) -> DataPosition:
    """Where in the data a loader is."""
    state = loader.state_dict()
    return DataPosition(state["epoch"], state["position"])


def group_name(purpose: str, step: int, place: int) -> str:
    """The `uid` of all responses to a prompt; `place` counts the prompts of one purpose in a step."""
    return f"{purpose}-{step}-{place}"


def make_requests(
    rows: Batch, *, n: int, seed: int, purpose: str, step: int, first_row: int = 0
) -> tuple[DataProto, DataProto]:
    """Split collated rows into requests for the rollout and labels for the rest, each prompt n times in a row.

    Every response has a seed of its own, made from (seed, purpose, step, its place), so that it does not depend on
    which device samples it. `uid` names the group of responses to one prompt. `first_row` is the place of the first
    prompt, where the prompts of a step come in several batches: their size then changes nothing.
    """
    data = DataProto.from_single_dict(rows)
    places = range(first_row, first_row + len(data))
    data.non_tensor_batch["uid"] = np.array([group_name(purpose, step, place) for place in places], dtype=object)
    labels = data.repeat(n, interleave=True)
    requests = labels.pop(batch_keys=[*REQUEST_COLUMNS, *(name for name in IMAGE_COLUMNS if name in labels.batch)])
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), step])
    seeds = sequence.generate_state(places.stop * n, dtype=np.uint64)[first_row * n :] >> np.uint64(1)
    requests.batch["seeds"] = torch.from_numpy(seeds.astype(np.int64))
    return requests, labels
