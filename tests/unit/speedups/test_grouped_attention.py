"""Grouped attention against repeated heads."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.speedups.grouped_attention import grouped_sdpa


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
