"""Log-probabilities and entropies of tokens, from logits, without keeping more than the logits for the backward pass.

With a vocabulary of 150,000 a row of logits is the largest tensor of a training step by far. Left to autograd, the
division by the temperature, the softmax and the entropy would each keep another tensor of that size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_log_probs_and_entropy(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution it came from, both (batch, length) float32.

    `logits` (batch, length, vocabulary) are divided by `temperature`; `tokens` are (batch, length). Differentiable in
    `logits`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; set it to more than 0.")
    return _TokenStatistics.apply(logits, tokens, temperature)


class _TokenStatistics(torch.autograd.Function):
    """Row by row, so that no temporary is larger than one row's logits; the backward pass computes it again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(log_probs)
        for row in range(len(logits)):
            log_softmax = _log_softmax(logits[row], temperature)
            log_probs[row] = log_softmax.gather(-1, tokens[row].unsqueeze(-1)).squeeze(-1)
            entropy[row] = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        # An output that the loss does not use then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        """With p = softmax(z), z = logits / temperature: d log p_t / dz = onehot(t) - p;  dH / dz = -p (log p + H)."""
        logits, tokens, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for row in range(len(logits)):
            log_softmax = _log_softmax(logits[row], ctx.temperature)
            weight = torch.zeros_like(entropy[row]).unsqueeze(-1)
            if grad_log_probs is not None:
                weight = weight - grad_log_probs[row].unsqueeze(-1)
            if grad_entropy is not None:
                surprise = log_softmax + entropy[row].unsqueeze(-1)
                weight = weight - grad_entropy[row].unsqueeze(-1) * surprise
            grad_row = log_softmax.exp().mul(weight)
            if grad_log_probs is not None:
                grad_row.scatter_add_(-1, tokens[row].unsqueeze(-1), grad_log_probs[row].unsqueeze(-1))
            grad[row] = grad_row.div_(ctx.temperature)
        return grad, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.float() / temperature, dim=-1)
