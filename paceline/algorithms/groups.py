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
        self.is_response = response_mask.bool().any(dim=-1)
        """Which rows (batch,) belong to a group."""
        numbers = torch.from_numpy(_group_numbers(index, len(response_mask)))
        self._group_of_row = numbers.to(response_mask.device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x (batch, ...) over the responses of each row's group, at each row."""
        responses = self.is_response.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        sums = torch.zeros_like(x).index_add(0, self._group_of_row, zero_outside(x, responses))
        return sums[self._group_of_row]

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """The largest x (batch,) of the responses of each row's group, at each row; -infinity where it has none."""
        candidates = x.masked_fill(~self.is_response, -torch.inf)
        largest = torch.full_like(x, -torch.inf).scatter_reduce(0, self._group_of_row, candidates, "amax")
        return largest[self._group_of_row]

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

    def std(self, x: torch.Tensor) -> torch.Tensor:
        """The unbiased standard deviation of x (batch,) in each row's group, at each row; 0 in a group of one."""
        return (self.sum(self.centre(x).square()) / (self.sizes(like=x) - 1).clamp(min=1)).sqrt()

    def differ(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (batch,) that are responses of a group in which x (batch,) is not the same for all."""
        return self.is_response & (self.max(x) > -self.max(-x))


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
    spread: np.ndarray = (lowest < highest)[group_of_row]
    return spread


def _group_numbers(index: GroupIds, num_rows: int) -> np.ndarray:
    """The groups, numbered in the order in which they come, at each row."""
    if len(index) != num_rows:
        raise ValueError(f"index has {len(index)} group ids for {num_rows} responses; give one for each.")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in index], dtype=np.int64)
