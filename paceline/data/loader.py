"""Batches of prompts in an order that depends on the seed and the epoch only, from any position on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.data.custom_data import epoch_order, epoch_size
from paceline.data.rl_dataset import Batch, Item, RLHFDataset, collate_fn
from paceline.errors import CheckpointError, ConfigError


class PromptLoader:
    """Iterating yields the batches of one epoch; the next iteration is the next epoch, in another order if shuffled.

    The position is part of the object, not of an iterator: after `load_state_dict`, or after leaving a loop early,
    iterating goes on with the next batch. The last batch of an epoch may be smaller; with `drop_last` it is left out,
    other prompts in each epoch if shuffled. Prompts are tokenised when the dataset is made, so there is nothing that
    worker processes could do ahead.

    A `sampler` gives the rows of each epoch instead; those of the epoch under way are part of the position.

    >>> loader = make_dataloader(dataset, batch_size=4, shuffle=True, seed=1)  # doctest: +SKIP
    >>> loader.state_dict()  # doctest: +SKIP
    {'epoch': 0, 'position': 8, 'num_prompts': 100, 'seed': 1, 'shuffle': True}
    """

    def __init__(
        self,
        dataset: RLHFDataset,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        collate: Callable[[Sequence[Item]], Batch] = collate_fn,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; it must be at least 1.")
        if hasattr(sampler, "update"):
            raise ConfigError(
                f"The sampler {type(sampler).__name__} has `update`: an order that follows the scores is not supported "
                "yet. Give one without it, which gives the rows of a whole epoch."
            )
        num_prompts = len(dataset) if sampler is None else epoch_size(sampler, len(dataset))
        if drop_last and num_prompts < batch_size:
            raise ConfigError(
                f"data.drop_last=True leaves nothing to train on: an epoch has {num_prompts} prompts, fewer than one "
                f"batch of {batch_size}. Set data.drop_last=False or data.train_batch_size to at most {num_prompts}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.sampler = sampler
        self.collate = collate
        self.num_prompts = num_prompts
        """In an epoch."""
        self._sampled: list[int] | None = None  # the sampler's rows of this epoch, once it was asked
        self._epoch = 0
        self._position = 0  # prompts of this epoch that were handed out

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self.num_prompts, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        if not self._next_size():
            self._epoch, self._position, self._sampled = self._epoch + 1, 0, None
        order = self._order(self._epoch)
        while size := self._next_size():
            rows = order[self._position : self._position + size]
            self._position += size
            yield self.collate([self.dataset[int(row)] for row in rows])

    def _next_size(self) -> int:
        """Prompts in the next batch of this epoch; 0 at its end."""
        left = self.num_prompts - self._position
        return 0 if self.drop_last and left < self.batch_size else min(left, self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        if self.sampler is not None:
            if self._sampled is None:
                self._sampled = epoch_order(self.sampler, epoch, len(self.dataset))
            return np.array(self._sampled)
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out."""
        state = {"epoch": self._epoch, "position": self._position, **self._identity()}
        return state if self._sampled is None else {**state, "sampled": self._sampled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Its order must be this loader's."""
        for key, now in self._identity().items():
            if state.get(key) != now:
                raise CheckpointError(
                    f"The saved data position does not fit: it was taken with {key}={state.get(key)}, now it is {now}. "
                    "Use the same data files, filter, seed and shuffle, or start over with trainer.resume_mode=disable."
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._sampled = state.get("sampled")

    def _identity(self) -> dict[str, Any]:
        identity = {"num_prompts": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}
        return identity if self.sampler is None else {**identity, "sampler": type(self.sampler).__name__}


def make_dataloader(
    dataset: RLHFDataset,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool = False,
    *,
    sampler: Iterable[int] | None = None,
    collate: Callable[[Sequence[Item]], Batch] | None = None,
) -> PromptLoader:
    """Batches of `batch_size` prompts, as dicts that fit `DataProto.from_single_dict`."""
    return PromptLoader(
        dataset, batch_size, shuffle, seed, drop_last=drop_last, sampler=sampler, collate=collate or collate_fn
    )
