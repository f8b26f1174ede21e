"""A model in stages, one behind the other on the ranks of a group: what passes between them.

One micro-batch goes through at a time: a stage waits for the one before it and, in the backward pass, for the one
behind it. Every rank gets what the last stage answers and computes the loss; the last one's gradient counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Stages:
    """The stages of one model, and which this rank has."""

    group: dist.ProcessGroup

    @property
    def index(self) -> int:
        return self.group.rank()

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def hidden_before(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The hidden states of the stage before. Their gradient goes there in the backward pass."""
        anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        hidden: Tensor = _FromBefore.apply(anchor, tuple(shape), self)
        return hidden

    def answers_behind(self, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """What the last stage answers to these hidden states, of `shape`. In the backward pass their gradient comes."""
        answers: Tensor = _FromBehind.apply(hidden, tuple(shape), self)
        return answers

    def tell(self, answers: Tensor) -> None:
        """Of the last stage: give the others its answers."""
        dist.broadcast(answers.detach().contiguous(), group=self.group, group_src=self.index)


class _FromBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], stages: Stages) -> Tensor:
        ctx.stages = stages
        hidden = torch.empty(shape, device=anchor.device)
        dist.recv(hidden, group=stages.group, group_src=stages.index - 1)
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        dist.send(grads[0].contiguous(), group=ctx.stages.group, group_dst=ctx.stages.index - 1)
        return None, None, None


class _FromBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: tuple[int, ...], stages: Stages) -> Tensor:
        ctx.stages, ctx.shape = stages, hidden.shape
        dist.send(hidden.contiguous(), group=stages.group, group_dst=stages.index + 1)
        answers = torch.empty(shape, device=hidden.device)
        dist.broadcast(answers, group=stages.group, group_src=stages.count - 1)
        return answers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = torch.empty(ctx.shape, device=grads[0].device)
        dist.recv(grad, group=ctx.stages.group, group_src=ctx.stages.index + 1)
        return grad, None, None
