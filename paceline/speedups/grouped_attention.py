"""Attention of one new token that reads the cache in place.

transformers' SDPA attention repeats grouped keys and values for every query head when there is a padding mask, which
costs more than the attention itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "paceline_grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA that never copies the cache: the query heads that share a key head are handed over as query positions.

    Query (rows, heads, 1, head_dim) becomes (rows, key_heads, heads / key_heads, head_dim). Anything but the
    decoding of one token with grouped heads goes to transformers' own SDPA.
    """
    rows, heads, positions, head_dim = query.shape
    key_heads = key.shape[1]
    per_head_mask = attention_mask is not None and attention_mask.shape[1] != 1
    if positions != 1 or heads == key_heads or per_head_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(rows, key_heads, heads // key_heads, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
