"""Log-probabilities and entropies of tokens, from logits or from the hidden states under them.

With a vocabulary of 150,000 the logits of a micro-batch are the largest tensor of a training step by far, and left to
autograd the division by the temperature, the softmax and the entropy would each keep another one. From hidden states
only the logits of `CHUNK_ELEMENTS` exist at a time; the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from paceline.speedups import faster_linear

CHUNK_ELEMENTS = 2**24
"""Logits that exist at one time: 64 MiB in float32, 111 tokens of a vocabulary of 150,000."""


def token_log_probs_and_entropy(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution it came from, both (..., length) float32.

    `logits` (..., length, vocabulary) are divided by `temperature`; `tokens` are (..., length). Differentiable in
    `logits`, of which nothing larger than a chunk is kept or made besides their gradient.
    """
    check_temperature(temperature)
    with torch.autocast(logits.device.type, enabled=False):
        flat = _OfLogits.apply(logits.flatten(0, -2), tokens.flatten(), temperature)
    return flat[0].view_as(tokens), flat[1].view_as(tokens)


def hidden_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same of the logits that a linear head gives for `hidden` (length, size), with at most a chunk of them.

    `weight` is (vocabulary, size), `tokens` and both results are (length,). Differentiable in hidden, weight and bias.
    Logits that fit into one chunk are kept for the backward pass: that is faster, by a quarter of the head's work.
    """
    check_temperature(temperature)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # Once here rather than in every chunk; and the backward pass, where no autocast holds, computes in it too.
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        if len(hidden) * len(weight) <= CHUNK_ELEMENTS:
            return _OfLogits.apply(linear(hidden, weight, bias), tokens, temperature)
        return _OfHidden.apply(hidden, weight, bias, tokens, temperature)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs, entropy = (torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device) for _ in range(2))
        for part in chunks(len(tokens), logits.shape[-1]):
            log_probs[part], entropy[part] = _statistics(_scaled(logits[part], temperature), tokens[part])
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        # An output that the loss does not use then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, *statistics = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in chunks(len(logits), logits.shape[-1]):
            scaled = _scaled(logits[part], ctx.temperature)
            grad[part] = _gradients(scaled, *_at(statistics, part), *_at(grads, part)).div_(ctx.temperature)
        return grad, None, None


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = (torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device) for _ in range(2))
        for part in chunks(len(tokens), len(weight)):
            scaled = _scaled(linear(hidden[part], weight, bias), temperature, in_place=True)
            log_probs[part], entropy[part] = _statistics(scaled, tokens[part])
        ctx.save_for_backward(hidden, weight, bias, tokens, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *statistics = ctx.saved_tensors
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums over all tokens: in float32, also where the head computes in less.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        with faster_linear(hidden.device.type):
            for part in chunks(len(hidden), len(weight)):
                scaled = _scaled(linear(hidden[part], weight, bias), ctx.temperature, in_place=True)
                grad = _gradients(scaled, *_at(statistics, part), *_at(grads, part))
                grad = grad.div_(ctx.temperature).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = linear(grad, weight.T)
                if grad_weight is not None:
                    add_product(grad_weight, grad.T, hidden[part])
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0, dtype=torch.float32)
        return grad_hidden, with_dtype_of(grad_weight, weight), with_dtype_of(grad_bias, bias), None, None


def _statistics(scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = scaled.log_softmax(dim=-1)
    log_probs = log_softmax.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return log_probs, -torch.linalg.vecdot(torch.exp(log_softmax, out=scaled), log_softmax)


def _gradients(
    scaled: Tensor,
    tokens: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Of z, with p = softmax(z): d log p_t / dz = onehot(t) - p;  dH / dz = -p (log p + H). Overwrites `scaled`."""
    log_softmax = scaled.log_softmax(dim=-1)
    grad = torch.exp(log_softmax, out=scaled)
    weight = torch.zeros_like(entropy).unsqueeze(-1)
    if grad_entropy is not None:
        weight = log_softmax.add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
    if grad_log_probs is not None:
        weight = weight.sub_(grad_log_probs.unsqueeze(-1))
    grad.mul_(weight)
    if grad_log_probs is not None:
        grad.scatter_add_(-1, tokens.unsqueeze(-1), grad_log_probs.unsqueeze(-1))
    return grad


def _scaled(logits: Tensor, temperature: float, *, in_place: bool = False) -> Tensor:
    """logits / temperature in float32; new, or in place of the logits if they are float32."""
    return logits.float().div_(temperature) if in_place or logits.dtype != torch.float32 else logits / temperature


def chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + step) for start in range(0, num_tokens, step)]


def _at(tensors: Iterable[Tensor | None], part: slice) -> list[Any]:
    return [None if tensor is None else tensor[part] for tensor in tensors]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def with_dtype_of(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


def check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; set it to more than 0.")
