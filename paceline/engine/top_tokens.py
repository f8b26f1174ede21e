"""The likeliest tokens at each place, with their log-probs: what a teacher tells of its distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_PLACES = 256
"""Places whose logits exist at one time."""


@dataclass(frozen=True)
class Likeliest:
    """How many tokens, and of which: another model may have fewer embeddings than this one."""

    count: int
    vocabulary: int
    """Tokens from here on are not named. They have their part in the distribution all the same."""


@torch.no_grad()
def likeliest_tokens(
    logits_of: Callable[[slice], Tensor], places: int, temperature: float, asked: Likeliest
) -> tuple[Tensor, Tensor]:
    """Log-probs, float32, and tokens, int32, both (places, k), the likeliest first.

    `logits_of` gives the logits (part, vocabulary) of some places. Log-probs are those of the whole vocabulary at
    `temperature`. k is `asked.count`, or less in a smaller vocabulary.
    """
    log_probs: list[Tensor] = []
    tokens: list[Tensor] = []
    for start in range(0, max(places, 1), CHUNK_PLACES):
        log_softmax = (logits_of(slice(start, start + CHUNK_PLACES)).float() / temperature).log_softmax(dim=-1)
        named = log_softmax[:, : asked.vocabulary]
        found = named.topk(min(asked.count, named.shape[-1]), dim=-1)
        log_probs.append(found.values)
        tokens.append(found.indices.int())
    return torch.cat(log_probs), torch.cat(tokens)
