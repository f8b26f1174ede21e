"""Sums, means, whitening and returns over the valid entries of a tensor.

Entries outside the mask are selected away and not multiplied by zero, so NaN or infinity there changes neither a
result nor a gradient. Masks have the shape of what they mask; non-zero means valid.
"""

from __future__ import annotations

import torch


def zero_outside(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` with zeros where `mask` is 0.

    Apply it to the *inputs* of a formula that is differentiated: selecting only its result leaves 0 * NaN in the
    backward pass.
    """
    if x.shape != mask.shape:
        raise ValueError(f"The mask has shape {tuple(mask.shape)}, what it masks {tuple(x.shape)}; they must be equal.")
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of the valid entries, of all or along `dim`; 0 where there are none."""
    return zero_outside(x, mask).sum(dim=dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of the valid entries, of all or along `dim`; 0 where there are none."""
    return masked_sum(x, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scale the valid entries to mean 0 and variance 1; zeros outside the mask.

    (x - mean) * rsqrt(var + 1e-8), with the unbiased variance sum((x - mean)^2) / (n - 1). A single valid entry has
    variance 0 and so becomes 0.
    """
    centred = _centre(x, mask)
    variance = masked_sum(centred.square(), mask) / (mask.bool().sum() - 1).clamp(min=1)
    return zero_outside(centred * torch.rsqrt(variance + 1e-8), mask)


def return_to_go(x: torch.Tensor, mask: torch.Tensor, discount: float | torch.Tensor = 1.0) -> torch.Tensor:
    """x_t plus `discount` times the result at the next valid token, along the rows of x (batch, response).

    `discount` is one number, or one for each row (batch,). The result is 0 outside the mask.
    """
    valid = mask.bool()
    result = zero_outside(x, mask)
    following = result.new_zeros(len(result))
    for t in reversed(range(result.shape[1])):
        following = torch.where(valid[:, t], result[:, t] + discount * following, following)
        result[:, t] = following
    return zero_outside(result, mask)


def _centre(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """x - mean(x) on the valid entries, zeros elsewhere.

    The second pass removes the rounding error of the mean. Without it equal entries differ from their mean by that
    error, which whitening multiplies by 1e4.
    """
    centred = zero_outside(x - masked_mean(x, mask), mask)
    return zero_outside(centred - masked_mean(centred, mask), mask)
