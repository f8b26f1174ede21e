"""Log-probabilities and entropies of tokens where each rank of a group has the head's rows of a part of the tokens.

As `logprobs.hidden_log_probs_and_entropy`, with three numbers per token summed over the group instead of whole logits:
no rank ever has the logits of another's part, nor more than a chunk of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from paceline.engine.logprobs import add_product, check_temperature, chunks, with_dtype_of


def parallel_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, *, first: int, largest: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Both (length,) float32, the same on all ranks of `group`, for the same `hidden` (length, size) on all of them.

    `weight` (part, size) are the rows of the tokens from `first` on; `largest` is the largest part of any rank.
    Differentiable in hidden and weight. The gradient of `hidden` is whole on every rank, as `hidden` is.
    """
    check_temperature(temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        return _OfHead.apply(hidden, weight, tokens - first, temperature, largest, group)


class _OfHead(torch.autograd.Function):
    """`tokens` count from the part's first row: those of other parts are outside of it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, largest: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        log_sum, entropy, picked = torch.empty(3, len(hidden), device=hidden.device)
        for part in chunks(len(hidden), largest):
            scaled = _scaled(hidden[part], weight, temperature)
            top = scaled.amax(dim=-1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            weights = (scaled - top[:, None]).exp_()
            inside, places = _own(tokens[part], len(weight))
            own = torch.where(inside, scaled.gather(-1, places[:, None]).squeeze(-1), 0.0)
            sums = torch.stack([weights.sum(dim=-1), torch.linalg.vecdot(weights, scaled), own])
            dist.all_reduce(sums, group=group)
            log_sum[part] = top + sums[0].log()
            entropy[part] = log_sum[part] - sums[1] / sums[0]
            picked[part] = sums[2]
        ctx.save_for_backward(hidden, weight, tokens, log_sum, entropy)
        ctx.temperature, ctx.largest, ctx.group = temperature, largest, group
        return picked - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Of z, with p = softmax(z): d log p_t / dz = onehot(t) - p;  dH / dz = -p (log p + H)."""
        hidden, weight, tokens, log_sum, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in chunks(len(hidden), ctx.largest):
            log_softmax = _scaled(hidden[part], weight, ctx.temperature).sub_(log_sum[part, None])
            of_log_prob = grad_log_probs[part, None]
            factor = of_log_prob + grad_entropy[part, None] * (log_softmax + entropy[part, None])
            grad = log_softmax.exp_().mul_(factor).neg_()
            inside, places = _own(tokens[part], len(weight))
            grad.scatter_add_(-1, places[:, None], torch.where(inside[:, None], of_log_prob, 0.0))
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            add_product(grad_weight, grad.T, hidden[part])
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, with_dtype_of(grad_weight, weight), None, None, None, None


def _scaled(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return linear(hidden, weight).float().div_(temperature)


def _own(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which tokens are of this part, and a row for each."""
    return (tokens >= 0) & (tokens < size), tokens.clamp(0, size - 1)
