"""Losses of training on given texts: next tokens, scores of pairs, preferences against a reference.

Each gives a value per token or pair; the caller sums, and divides by counts of the whole batch over all ranks, so that
neither micro-batches nor ranks change an update.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.algorithms.masking import masked_mean, masked_sum

PreferenceForm = Literal["sigmoid", "sigmoid_norm", "ipo"]


def pair_score_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, center: float) -> tuple[Tensor, Tensor]:
    """Of each pair, (pairs,): -log sigmoid(chosen - rejected - margin), and `center` * (chosen + rejected)^2.

    The first is the model of Bradley and Terry with Llama 2's margin; the second keeps scores around 0, which the first
    leaves free.

    >>> from torch import tensor
    >>> losses = pair_score_losses(tensor([1.2, 0.1]), tensor([0.3, 0.4]), tensor([0.5, 0.0]), center=0.01)
    >>> [round(loss.mean().item(), 6) for loss in losses]
    [0.683685, 0.0125]
    """
    return -logsigmoid(chosen - rejected - margin), center * (chosen + rejected) ** 2


def response_log_probs(log_probs: Tensor, mask: Tensor, *, per_token: bool) -> Tensor:
    """(rows,): the log-prob of each response, or its mean over the response's tokens."""
    return masked_mean(log_probs, mask, dim=-1) if per_token else masked_sum(log_probs, mask, dim=-1)


def is_per_token(form: PreferenceForm) -> bool:
    """Whether a form compares mean log-probs of tokens, so that longer responses have no other scale."""
    return form != "sigmoid"


def preference_losses(
    chosen: Tensor, rejected: Tensor, *, form: PreferenceForm, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Of each pair, (pairs,). `chosen` and `rejected` are log-probs of the responses less those of the reference.

    With h = chosen - rejected: -log sigmoid(beta h), of which a share of label_smoothing has the labels the other way
    round; for ipo (h - 1 / (2 beta))^2.

    >>> from torch import tensor
    >>> h = tensor([2.0, -1.0]), tensor([0.5, 0.0])
    >>> [round(x, 6) for x in preference_losses(*h, form="sigmoid", beta=0.5).tolist()]
    [0.386871, 0.974077]
    >>> preference_losses(*h, form="ipo", beta=0.5).tolist()
    [0.25, 4.0]
    """
    difference = chosen - rejected
    if form == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    as_labelled, other_way = -logsigmoid(beta * difference), -logsigmoid(-beta * difference)
    return (1 - label_smoothing) * as_labelled + label_smoothing * other_way
