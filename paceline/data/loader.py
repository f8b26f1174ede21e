"""Batches of prompts in an order that depends on the seed and the epoch only, from any position on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.data.rl_dataset import RLHFDataset, collate_fn
from paceline.errors import CheckpointError, ConfigError

__all__ = ["PromptLoader", "make_dataloader"]


class PromptLoader:
    """Iterating yields the batches of one epoch; the next iteration is the next epoch, in another order if shuffled.

    The position is part of the object, not of an iterator: after `load_state_dict`, or after leaving a loop early,
    iterating goes on with the next batch. The last batch of an epoch may be smaller; with `drop_last` it is left out,
    other prompts in each epoch if shuffled. Prompts are tokenised when the dataset is made, so there is nothing that
    worker processes could do ahead.

    >>> loader = make_dataloader(dataset, batch_size=4, shuffle=True, seed=1)  # doctest: +SKIP
    >>> loader.state_dict()  # doctest: +SKIP
    {'epoch': 0, 'position': 8, 'num_prompts': 100, 'seed': 1, 'shuffle': True}
    """

    def __init__(
        self, dataset: RLHFDataset, batch_size: int, shuffle: bool, seed: int, *, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}; it must be at least 1.")
        if drop_last and len(dataset) < batch_size:
            raise ConfigError(
                f"data.drop_last=True leaves nothing to train on: an epoch has {len(dataset)} prompts, fewer than one "
                f"batch of {batch_size}. Set data.drop_last=False or data.train_batch_size to at most {len(dataset)}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._epoch = 0
        self._position = 0  # prompts of this epoch that were handed out

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._next_size():
            self._epoch, self._position = self._epoch + 1, 0
        order = self._order(self._epoch)
        while size := self._next_size():
            rows = order[self._position : self._position + size]
            self._position += size
            yield collate_fn([self.dataset[int(row)] for row in rows])

    def _next_size(self) -> int:
        """Prompts in the next batch of this epoch; 0 at its end."""
        left = len(self.dataset) - self._position
        return 0 if self.drop_last and left < self.batch_size else min(left, self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Its order must be this loader's."""
        for key, now in self._identity().items():
            if state.get(key) != now:
                raise CheckpointError(
                    f"The saved data position does not fit: it was taken with {key}={state.get(key)}, now it is {now}. "
                    "Use the same data files, filter, seed and shuffle, or start anew with trainer.resume_mode=disable."
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"num_prompts": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}


def make_dataloader(
    dataset: RLHFDataset, batch_size: int, shuffle: bool, seed: int, drop_last: bool = False
) -> PromptLoader:
    """Batches of `batch_size` prompts, as dicts that fit `DataProto.from_single_dict`."""
    return PromptLoader(dataset, batch_size, shuffle, seed, drop_last=drop_last)
