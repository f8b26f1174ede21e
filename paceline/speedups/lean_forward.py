"""For sampling: attention that copies no cache, and a forward pass of Llama and similar models without overhead.

A decoding step of few rows is short: what transformers does around the arithmetic takes a fifth of it. Here masks are
made once, the last layer computes the last position only, and on a CPU weights are packed (`packed_linear`). Adapters
and autocast work, since the model's own modules are called. The models are known by name: others with the same
modules scale, cap or skip something.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paceline.private_apis.transformers_private import attention_name
from paceline.speedups.fast_linear import packed_linear

GROUPED_SDPA = "paceline_grouped_sdpa"
PLAIN = {f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def is_plain(model: PreTrainedModel) -> bool:
    """Whether `LeanForward` computes what the model's own forward pass does."""
    return (
        type(model).__name__ in PLAIN
        and type(model).__module__.startswith("transformers.models.")
        and attention_name(model) == "sdpa"
        and getattr(model.config, "sliding_window", None) is None
    )


class LeanForward:
    """A plain model with its weights of this moment."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body: Any = model.model
        self._layers = [_Layer(layer) for layer in self._body.layers]
        self._head = packed_linear(model.lm_head)

    def __call__(self, input_ids: Tensor, positions: Tensor, visible: Tensor | None, cache: Cache) -> Tensor:
        """Logits (rows, vocabulary) after the last position.

        Args:
            input_ids: (rows, new), whose keys and values join the cache.
            positions: (rows, new).
            visible: (rows, columns) bool, the columns of the cache, the new ones included, that a row attends to. A new
                position attends to no later one. None for all, of an empty cache or of one new position.
        """
        hidden = self._body.embed_tokens(input_ids)
        rotation = self._body.rotary_emb(hidden, positions)
        mask_of_last = None if visible is None else visible[:, None, None]
        mask = mask_of_last
        if mask is not None and (num_new := input_ids.shape[1]) > 1:
            mask = mask & mask.new_ones(num_new, mask.shape[-1]).tril(mask.shape[-1] - num_new)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, rotation, mask, cache)
        hidden = self._layers[-1](hidden, rotation, mask_of_last, cache, last_only=True)
        return self._head(self._body.norm(hidden))[:, -1]


class _Layer:
    def __init__(self, layer: Any) -> None:
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._attention_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        no_norm = nn.Identity()
        self._query_norm, self._key_norm = (getattr(self._attention, name, no_norm) for name in ("q_norm", "k_norm"))
        self._query, self._key, self._value, self._output = (
            packed_linear(getattr(self._attention, f"{name}_proj")) for name in "qkvo"
        )
        self._gate, self._up, self._down = (
            packed_linear(getattr(self._mlp, f"{name}_proj")) for name in ("gate", "up", "down")
        )

    def __call__(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Hidden states (rows, new, hidden_size) after the layer, or of the last position alone."""
        attention = self._attention
        by_head = (-1, attention.head_dim)
        normed = self._attention_norm(hidden)
        key = _rotate(self._key_norm(self._key(normed).unflatten(-1, by_head)), *rotation)
        value = self._value(normed).unflatten(-1, by_head)
        keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), attention.layer_idx)
        if last_only:
            hidden, normed = hidden[:, -1:], normed[:, -1:]
            rotation = rotation[0][:, -1:], rotation[1][:, -1:]
        query = _rotate(self._query_norm(self._query(normed).unflatten(-1, by_head)), *rotation)
        attended, _ = grouped_sdpa(attention, query.transpose(1, 2), keys, values, mask, scaling=attention.scaling)
        hidden = hidden + self._output(attended.flatten(2))
        normed = self._mlp_norm(hidden)
        return hidden + self._down(self._mlp.act_fn(self._gate(normed)) * self._up(normed))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (rows, new, heads, head_dim): the first half of a head's dimensions turns with the second."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos.unsqueeze(2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(2)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token that reads the cache in place.

    transformers' SDPA repeats keys and values for every query head when there is a padding mask, which costs more than
    the attention itself. Here the query heads that share a key head are handed over as query positions: the query
    (rows, heads, 1, head_dim) becomes (rows, key_heads, heads / key_heads, head_dim). Anything but the decoding of one
    token with grouped heads goes to transformers' SDPA.
    """
    rows, heads, positions, head_dim = query.shape
    key_heads = key.shape[1]
    per_head_mask = attention_mask is not None and attention_mask.shape[1] != 1
    if positions != 1 or heads == key_heads or per_head_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(rows, key_heads, heads // key_heads, head_dim)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
