"""Log-probabilities and entropies of tokens, from logits or from the hidden states under them.

Where `sum_pi_squared` is asked for, there is a third result: at each token, the sum over the vocabulary of the squared
probabilities. It has no gradient.

With a vocabulary of 150,000 the logits of a micro-batch are the largest tensor of a training step by far, and left to
autograd the division by the temperature, the softmax and the entropy would each keep another one. From hidden states
only the logits of `CHUNK_ELEMENTS` exist at a time; the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from paceline.speedups import faster_linear

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
TOKEN_STATISTICS = ("log_probs", "entropy", "sum_pi_squared")
"""What the results of the functions below are called, in their order; the last is there if it is asked for."""
CHUNK_ELEMENTS = 2**24
"""Logits that exist at one time: 64 MiB in float32, 111 tokens of a vocabulary of 150,000."""


def token_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, temperature: float, *, sum_pi_squared: bool = False
) -> tuple[Tensor, ...]:
    """Log-probability of each token, and entropy of the distribution it came from, both (..., length) float32.

    `logits` (..., length, vocabulary) are divided by `temperature`; `tokens` are (..., length), or (..., length, k) for
    the log-probs of several tokens at each place. Differentiable in `logits`, of which nothing larger than a chunk is
    kept or made besides their gradient.
    """
    _check_temperature(temperature)
    places = logits.shape[:-1]
    with torch.autocast(logits.device.type, enabled=False):
        flat = _OfLogits.apply(logits.flatten(0, -2), tokens.flatten(0, len(places) - 1), temperature, sum_pi_squared)
    return tuple(column.view(tokens.shape if number == 0 else places) for number, column in enumerate(flat))


def hidden_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    *,
    sum_pi_squared: bool = False,
) -> tuple[Tensor, ...]:
    """The same of the logits that a linear head gives for `hidden` (length, size), with at most a chunk of them.

    `weight` is (vocabulary, size), `tokens` and all results are (length,); or `tokens` and their log-probs (length, k).
    Differentiable in hidden, weight and bias.
    Logits that fit into one chunk are kept for the backward pass: that is faster, by a quarter of the head's work.
    """
    _check_temperature(temperature)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # Once here rather than in every chunk; and the backward pass, where no autocast holds, computes in it too.
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        if len(hidden) * len(weight) <= CHUNK_ELEMENTS:
            return _OfLogits.apply(linear(hidden, weight, bias), tokens, temperature, sum_pi_squared)
        return _OfHidden.apply(hidden, weight, bias, tokens, temperature, sum_pi_squared)


def parallel_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: float,
    *,
    first: int,
    largest: int,
    group: dist.ProcessGroup,
    sum_pi_squared: bool = False,
) -> tuple[Tensor, ...]:
    """The same where each rank of `group` has the head's rows of a part of the vocabulary; `hidden` is on all of them.

    `weight` (part, size) are the rows of the tokens from `first` on; `largest` is the largest part of any rank. Three
    numbers per token, or four, are summed over the group: no rank has the logits of another's part. Differentiable in
    hidden and weight. The gradient of `hidden` is whole on every rank, as `hidden` is.
    """
    _check_temperature(temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        return _OfPart.apply(hidden, weight, tokens - first, temperature, largest, group, sum_pi_squared)


class _LogProbContext(Protocol):
    """What torch keeps of a call for its backward pass, with what the functions below add to it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float
    largest: int
    group: dist.ProcessGroup

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LogProbContext, logits: Tensor, tokens: Tensor, temperature: float, sum_pi_squared: bool
    ) -> tuple[Tensor, ...]:
        columns = _new_columns(tokens, sum_pi_squared)
        for part in _chunks(len(tokens), logits.shape[-1]):
            _fill(columns, part, _scaled(logits[part], temperature), tokens)
        ctx.save_for_backward(logits, tokens, columns[1])
        ctx.temperature = temperature
        # An output that the loss does not use then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*columns[2:])
        return columns

    @staticmethod
    def backward(ctx: _LogProbContext, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, *statistics = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _chunks(len(logits), logits.shape[-1]):
            scaled = _scaled(logits[part], ctx.temperature)
            grad[part] = _gradients(scaled, *_at(statistics, part), *_at(grads[:2], part)).div_(ctx.temperature)
        return grad, None, None, None


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LogProbContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        sum_pi_squared: bool,
    ) -> tuple[Tensor, ...]:
        columns = _new_columns(tokens, sum_pi_squared)
        for part in _chunks(len(tokens), len(weight)):
            _fill(columns, part, _scaled(linear(hidden[part], weight, bias), temperature, in_place=True), tokens)
        ctx.save_for_backward(hidden, weight, bias, tokens, columns[1])
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*columns[2:])
        return columns

    @staticmethod
    def backward(ctx: _LogProbContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *statistics = ctx.saved_tensors
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums over all tokens: in float32, also where the head computes in less.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        with faster_linear(hidden.device.type):
            for part in _chunks(len(hidden), len(weight)):
                scaled = _scaled(linear(hidden[part], weight, bias), ctx.temperature, in_place=True)
                grad = _gradients(scaled, *_at(statistics, part), *_at(grads[:2], part))
                grad = grad.div_(ctx.temperature).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = linear(grad, weight.T)
                if grad_weight is not None:
                    _add_product(grad_weight, grad.T, hidden[part])
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0, dtype=torch.float32)
        return grad_hidden, _with_dtype_of(grad_weight, weight), _with_dtype_of(grad_bias, bias), None, None, None


class _OfPart(torch.autograd.Function):
    """`tokens` count from the part's first row: those of other parts are outside of it."""

    @staticmethod
    def forward(
        ctx: _LogProbContext,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        largest: int,
        group: dist.ProcessGroup,
        sum_pi_squared: bool,
    ) -> tuple[Tensor, ...]:
        log_sum, entropy, picked, squares = torch.empty(4, len(hidden), device=hidden.device)
        for part in _chunks(len(hidden), largest):
            scaled = _scaled(linear(hidden[part], weight), temperature, in_place=True)
            top = scaled.amax(dim=-1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            weights = (scaled - top[:, None]).exp_()
            inside, places = _own(tokens[part], len(weight))
            own = torch.where(inside, scaled.gather(-1, places[:, None]).squeeze(-1), 0.0)
            of_squares = [torch.linalg.vecdot(weights, weights)] if sum_pi_squared else []
            sums = torch.stack([weights.sum(dim=-1), torch.linalg.vecdot(weights, scaled), own, *of_squares])
            dist.all_reduce(sums, group=group)
            log_sum[part] = top + sums[0].log()
            entropy[part] = log_sum[part] - sums[1] / sums[0]
            picked[part] = sums[2]
            if sum_pi_squared:
                squares[part] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden, weight, tokens, log_sum, entropy)
        ctx.temperature, ctx.largest, ctx.group = temperature, largest, group
        if not sum_pi_squared:
            return picked - log_sum, entropy
        ctx.mark_non_differentiable(squares)
        return picked - log_sum, entropy, squares

    @staticmethod
    def backward(
        ctx: _LogProbContext, grad_log_probs: Tensor, grad_entropy: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The derivatives are those of `_gradients`."""
        hidden, weight, tokens, log_sum, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(hidden), ctx.largest):
            scaled = _scaled(linear(hidden[part], weight), ctx.temperature, in_place=True)
            log_softmax = scaled.sub_(log_sum[part, None])
            of_log_prob = grad_log_probs[part, None]
            factor = of_log_prob + grad_entropy[part, None] * (log_softmax + entropy[part, None])
            grad = log_softmax.exp_().mul_(factor).neg_()
            inside, places = _own(tokens[part], len(weight))
            grad.scatter_add_(-1, places[:, None], torch.where(inside[:, None], of_log_prob, 0.0))
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            _add_product(grad_weight, grad.T, hidden[part])
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, _with_dtype_of(grad_weight, weight), None, None, None, None, None


def _new_columns(tokens: Tensor, sum_pi_squared: bool) -> tuple[Tensor, ...]:
    """Empty columns for `_fill`: log-probs, entropy and, if asked for, the sum of squared probabilities."""
    shapes = [tokens.shape, *[tokens.shape[:1]] * (1 + sum_pi_squared)]
    return tuple(torch.empty(shape, dtype=torch.float32, device=tokens.device) for shape in shapes)


def _fill(columns: tuple[Tensor, ...], part: slice, scaled: Tensor, tokens: Tensor) -> None:
    """Compute `part` of the columns from its logits, which are overwritten."""
    log_softmax = scaled.log_softmax(dim=-1)
    columns[0][part] = log_softmax.gather(-1, _by_place(tokens[part])).view_as(tokens[part])
    probabilities = torch.exp(log_softmax, out=scaled)
    columns[1][part] = -torch.linalg.vecdot(probabilities, log_softmax)
    if len(columns) > 2:
        columns[2][part] = torch.linalg.vecdot(probabilities, probabilities)


def _gradients(
    scaled: Tensor,
    tokens: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Of z, with p = softmax(z): d log p_t / dz = onehot(t) - p;  dH / dz = -p (log p + H). Overwrites `scaled`.

    Of several tokens at a place the gradients are added up.
    """
    log_softmax = scaled.log_softmax(dim=-1)
    grad = torch.exp(log_softmax, out=scaled)
    weight = torch.zeros_like(entropy).unsqueeze(-1)
    if grad_entropy is not None:
        weight = log_softmax.add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
    if grad_log_probs is not None:
        weight = weight.sub_(_by_place(grad_log_probs).sum(dim=-1, keepdim=True))
    grad.mul_(weight)
    if grad_log_probs is not None:
        grad.scatter_add_(-1, _by_place(tokens), _by_place(grad_log_probs))
    return grad


def _by_place(column: Tensor) -> Tensor:
    """(length,) or (length, k) as (length, k)."""
    return column.unsqueeze(-1) if column.dim() == 1 else column


def _scaled(logits: Tensor, temperature: float, *, in_place: bool = False) -> Tensor:
    """logits / temperature in float32; new, or in place of the logits if they are float32."""
    return logits.float().div_(temperature) if in_place or logits.dtype != torch.float32 else logits / temperature


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + step) for start in range(0, num_tokens, step)]


def _at(tensors: Iterable[MaybeTensor], part: slice) -> list[MaybeTensor]:
    return [None if tensor is None else tensor[part] for tensor in tensors]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _with_dtype_of(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; set it to more than 0.")


def _own(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which tokens are of this part, and a row for each."""
    return (tokens >= 0) & (tokens < size), tokens.clamp(0, size - 1)
