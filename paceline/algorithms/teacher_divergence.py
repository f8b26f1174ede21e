"""How far the policy is from a teacher at each place of a response, from the teacher's likeliest tokens.

From the sampled token alone it is estimated by `kl.kl_penalty`, with the teacher in the reference's place.
"""

from __future__ import annotations

import torch

SMALLEST_REST = 1e-6
"""Smallest probability of all tokens that are not compared: below it is rounding."""


def top_k_divergence(
    log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, *, floor: float | None = None, with_tail: bool = False
) -> torch.Tensor:
    """KL(teacher || policy) over k tokens (..., k) of the teacher's, for each place (...); gradient by `log_probs`.

    Log-probs are those of the whole vocabulary, so that both sums of probabilities, P of the teacher's and Q of the
    policy's, are less than 1: sum over the k tokens of p * (log p - log q), at least 0. With Q > P it can be below 0,
    and is then 0 without a gradient.

    `with_tail` all other tokens are one more class, with (1 - P) * log((1 - P) / (1 - Q)): a KL divergence of k + 1
    classes, never negative, which also pulls Q down where it is above P.

    `floor` is the smallest log-prob of either model; below it the policy's has no gradient.

    >>> q, p = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.6, 0.3]).log()
    >>> round(top_k_divergence(q, p).item(), 6)
    0.231032
    """
    student, teacher = log_probs, teacher_log_probs
    if floor is not None:
        student, teacher = student.clamp(min=floor), teacher.clamp(min=floor)
    divergence = (teacher.exp() * (teacher - student)).sum(dim=-1)
    if with_tail:
        rest, rest_of_teacher = _rest(log_probs), _rest(teacher_log_probs)
        divergence = divergence + rest_of_teacher * (rest_of_teacher / rest).log()
    return divergence.clamp(min=0)


def _rest(log_probs: torch.Tensor) -> torch.Tensor:
    """The probability (...) of all tokens but these."""
    return (1 - log_probs.exp().sum(dim=-1)).clamp(min=SMALLEST_REST)
