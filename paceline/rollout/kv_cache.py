"""Keys and values of a decoded batch, and attention on them.

transformers' DynamicCache copies the whole cache to append one token, and its SDPA attention repeats grouped keys and
values for every query head when there is a padding mask. Both cost more than the attention itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "paceline_grouped_sdpa"


class BufferedLayer(DynamicLayer):
    """One layer's keys and values (rows, heads, capacity, head_dim), of which the first `length` positions are filled.

    Starts from the padded prompts. Zeros to their left: attention masks them, but 0 * NaN would be NaN.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: int, length: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = (_with_room(like, rows, length).zero_() for like in (keys, values))
        self.length = length
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions in place; returns views of all that is filled."""
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.select(None, 0)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """How many positions are filled, padding included."""
        return self.length

    def select(self, rows: torch.Tensor | None, start: int) -> None:
        """Keep these rows (None: all) from position `start` on, with new room behind."""

        def kept(old: torch.Tensor) -> torch.Tensor:
            filled = old[:, :, start : self.length]
            filled = filled if rows is None else filled[rows]
            new = _with_room(old, len(filled), filled.shape[2])
            new[:, :, : filled.shape[2]] = filled
            return new

        self.keys, self.values = kept(self.keys), kept(self.values)
        self.length -= start


def _with_room(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Space for `length` positions and more to come: growing by a quarter bounds both the copying and the waste."""
    return like.new_empty(rows, like.shape[1], length + max(64, length // 4), like.shape[3])


class BufferedCache(Cache):
    """The cache of a batch of rows that decode together, filled from prompts and extended in place."""

    layers: list[Any]  # of BufferedLayer

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(layers=[])
        self.rows, self.prompt_length = rows, length

    def put(self, rows: torch.Tensor, prompts: DynamicCache, sources: torch.Tensor) -> None:
        """Copy row sources[i] of a prefill to rows[i], aligned at the right end of the prompts."""
        columns = slice(self.prompt_length - prompts.get_seq_length(), self.prompt_length)
        for index, (keys, values, _) in enumerate(prompts):
            if index == len(self.layers):
                self.layers.append(BufferedLayer(keys, values, self.rows, self.prompt_length))
            self.layers[index].keys[rows, :, columns] = keys[sources]
            self.layers[index].values[rows, :, columns] = values[sources]

    def select(self, rows: torch.Tensor, start: int) -> None:
        """Keep these rows, from position `start` on. Rotary positions are in the keys already, so they may move."""
        for layer in self.layers:
            layer.select(rows, start)


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
