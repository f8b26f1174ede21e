"""The buffered cache against transformers' own, and grouped attention against repeated heads."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.rollout.kv_cache import BufferedCache, grouped_sdpa

HEADS, DIM, LAYERS = 2, 4, 3


def prefilled(rows: int, length: int, seed: int) -> DynamicCache:
    dice, cache = torch.Generator().manual_seed(seed), DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, rows, HEADS, length, DIM, generator=dice), layer)
    return cache


def test_prompts_of_different_prefills_are_aligned_at_the_right() -> None:
    long, short = prefilled(1, 5, seed=0), prefilled(2, 3, seed=1)
    cache = BufferedCache(rows=4, length=5)
    cache.put(torch.tensor([2]), long, torch.tensor([0]))
    cache.put(torch.tensor([0, 1, 3]), short, torch.tensor([1, 1, 0]))
    assert cache.get_seq_length() == 5
    for layer in range(LAYERS):
        keys = cache.layers[layer].keys[:, :, :5]
        assert torch.equal(keys[2], long.layers[layer].keys[0])
        assert torch.equal(keys[0, :, 2:], short.layers[layer].keys[1])
        assert torch.equal(keys[1], keys[0])
        assert torch.equal(cache.layers[layer].values[3, :, 2:5], short.layers[layer].values[0])
        assert keys[[0, 1, 3], :, :2].abs().sum() == 0


def test_appending_and_selecting_rows_equals_transformers_cache() -> None:
    expected = prefilled(3, 5, seed=0)
    cache = BufferedCache(rows=3, length=5)
    cache.put(torch.arange(3), expected, torch.arange(3))
    dice, rows = torch.Generator().manual_seed(2), 3
    for step in range(200):  # beyond the first room, and the second
        if step == 20:
            rows = 2
            cache.select(torch.tensor([2, 0]), start=3)
            expected.batch_select_indices(torch.tensor([2, 0]))
            for layer in expected.layers:
                layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
        for layer in range(LAYERS):
            keys, values = torch.randn(2, rows, HEADS, 1, DIM, generator=dice)
            found, wanted = cache.update(keys, values, layer), expected.update(keys, values, layer)
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])
        assert cache.get_seq_length() == expected.get_seq_length()
        assert cache.get_mask_sizes(1, 0) == expected.get_mask_sizes(1, 0)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_equals_attention_with_repeated_heads(positions: int, key_heads: int, masked: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // key_heads
    query = torch.randn(5, 6, positions, 8, generator=dice)
    key, value = torch.randn(2, 5, key_heads, 7, 8, generator=dice)
    mask = torch.arange(7) >= torch.arange(5)[:, None] if masked else torch.ones(5, 7, dtype=torch.bool)
    mask = mask[:, None, None, :].expand(-1, -1, positions, -1) if masked or positions > 1 else None
    found, _ = grouped_sdpa(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
