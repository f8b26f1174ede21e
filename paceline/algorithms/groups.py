"""Responses to the same prompt form a group: sums within groups, and which groups have something to teach."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from paceline.algorithms.masking import zero_outside

GroupIds = np.ndarray | Sequence[Hashable]
"""The group of each row, such as the column uid."""


class Groups:
    """The groups of a batch. Rows without a valid token are padding and belong to no group."""

    def __init__(self, response_mask: torch.Tensor, index: GroupIds | None) -> None:
        if index is None:
            raise ValueError("The group ids (column uid) are needed as index; none were given.")
        self._is_response = response_mask.bool().any(dim=-1)
        numbers = torch.from_numpy(_group_numbers(index, len(response_mask)))
        self._group_of_row = numbers.to(response_mask.device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x (batch,) over the responses of each row's group, at each row."""
        sums = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        return sums.index_add(0, self._group_of_row, zero_outside(x, self._is_response))[self._group_of_row]

    def sizes(self, like: torch.Tensor) -> torch.Tensor:
        """Responses in each row's group, (batch,), in the dtype of `like`."""
        return self.sum(torch.ones_like(like))

    def centre(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch,) minus the mean of its group.

        The second pass removes the rounding error of the mean: in a group of equal scores nothing else would be left,
        and a division by the standard deviation would make it large.
        """
        size = self.sizes(like=x).clamp(min=1)
        centred = x - self.sum(x) / size
        return centred - self.sum(centred) / size


def groups_with_signal(scores: np.ndarray | torch.Tensor, uid: GroupIds) -> np.ndarray:
    """Rows (batch,) whose group has scores that differ; the others teach a group estimator nothing.

    This is the filter of DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, section 3.2). A group of one has
    nothing to differ from.

    >>> groups_with_signal(np.array([1.0, 0.0, 1.0, 1.0, 0.5]), ["a", "a", "b", "b", "c"])
    array([ True,  True, False, False, False])
    """
    values = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(values).all():
        rows = np.flatnonzero(~np.isfinite(values)).tolist()
        raise ValueError(f"Scores must be finite to be compared; those of rows {rows} are not. Look at their rewards.")
    group_of_row = _group_numbers(uid, len(values))
    lowest = np.full(len(values), np.inf)
    highest = np.full(len(values), -np.inf)
    np.minimum.at(lowest, group_of_row, values)
    np.maximum.at(highest, group_of_row, values)
    return (lowest < highest)[group_of_row]


def _group_numbers(index: GroupIds, num_rows: int) -> np.ndarray:
    """The groups, numbered in the order in which they come, at each row."""
    if len(index) != num_rows:
        raise ValueError(f"index has {len(index)} group ids for {num_rows} responses; give one for each.")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in index], dtype=np.int64)
