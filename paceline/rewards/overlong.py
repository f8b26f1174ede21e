"""DAPO's soft overlong punishment: a response loses the more, the nearer it comes to the length limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Overlong", "overlong_penalty"]


@dataclass(frozen=True)
class Overlong:
    """The numbers of `overlong_penalty`, and whether it is reported in the metrics."""

    max_len: int
    buffer_len: int
    penalty_factor: float = 1.0
    log: bool = False


def overlong_penalty(lengths: torch.Tensor, max_len: int, buffer_len: int, penalty_factor: float) -> torch.Tensor:
    """What is added to the scores of responses of these lengths (batch,), in tokens: 0 or less.

    0 up to max_len - buffer_len tokens, then linearly down to -penalty_factor at max_len and beyond (Yu et al. 2025,
    arXiv:2503.14476, equation 13).

    >>> overlong_penalty(torch.tensor([80, 90, 100, 120]), max_len=100, buffer_len=20, penalty_factor=1.0)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    left = (max_len - buffer_len - lengths).clamp(-buffer_len, 0)
    return left.float() / buffer_len * penalty_factor
