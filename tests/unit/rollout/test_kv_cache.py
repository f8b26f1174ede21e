"""The cache of rows that come and go."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from paceline.rollout.kv_cache import SlotCache

HEADS, DIM, LAYERS = 2, 4, 3


def prefilled(rows: int, length: int, seed: int) -> DynamicCache:
    dice, cache = torch.Generator().manual_seed(seed), DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, rows, HEADS, length, DIM, generator=dice), layer)
    return cache


def columns(cache: SlotCache, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention sees of the rows after a step."""
    return tuple(buffer[:rows, :, cache.start : cache.end] for buffer in cache.buffers[2 * layer : 2 * layer + 2])


def test_prompts_of_different_prefills_end_at_the_same_column() -> None:
    long, short = prefilled(1, 5, seed=0), prefilled(2, 3, seed=1)
    cache = SlotCache(slots=4)
    cache.put([2], long, [0], length=5)
    cache.put([0, 1, 3], short, [1, 1, 0], length=3)
    for layer in range(LAYERS):
        keys, values = columns(cache, layer, rows=4)
        assert torch.equal(keys[2], long.layers[layer].keys[0])
        assert torch.equal(keys[0, :, 2:], short.layers[layer].keys[1])
        assert torch.equal(keys[1], keys[0])
        assert torch.equal(values[3, :, 2:], short.layers[layer].values[0])
        assert keys[[0, 1, 3], :, :2].abs().sum() == 0


@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_rows_that_come_move_and_go_keep_what_was_appended_to_them(data: st.DataObject) -> None:
    """Against a list of tensors per row."""
    slots = data.draw(st.integers(1, 4), label="slots")
    cache, dice = SlotCache(slots), torch.Generator().manual_seed(0)
    rows: list[list[torch.Tensor]] = []  # per row and layer: keys and values (2, heads, length, head_dim)
    for _ in range(data.draw(st.integers(1, 6), label="rounds")):
        entering = data.draw(st.integers(0 if rows else 1, slots - len(rows)), label="entering")
        if entering:
            length = data.draw(st.integers(1, 90), label="length")
            prompts = prefilled(entering + 1, length, seed=len(rows))
            first = len(rows)
            rows += [
                [torch.stack([layer.keys[i + 1], layer.values[i + 1]]) for layer in prompts.layers]
                for i in range(entering)
            ]
            cache.put(list(range(first, len(rows))), prompts, list(range(1, entering + 1)), length)
        for _ in range(data.draw(st.integers(0, 80), label="steps")):
            longest = max(row[0].shape[2] for row in rows)
            cache.extend(longest)
            assert cache.get_seq_length() == longest
            assert cache.get_mask_sizes(1, 0) == (longest + 1, 0)
            for layer in range(LAYERS):
                new = torch.randn(2, len(rows), HEADS, 1, DIM, generator=dice)
                found = cache.update(*new, layer)
                for place, row in enumerate(rows):
                    row[layer] = torch.cat([row[layer], new[:, place]], dim=2)
                    length = row[layer].shape[2]
                    assert torch.equal(torch.stack([part[place, :, -length:] for part in found]), row[layer])
                    assert all(part.shape[2] == longest + 1 and part.isfinite().all() for part in found)
        going = data.draw(st.integers(0, len(rows) - 1), label="going")
        if going < len(rows) - 1:
            cache.move([len(rows) - 1], [going])
            rows[going] = rows[-1]
        rows.pop()
        if data.draw(st.booleans(), label="fewer slots"):
            slots = cache.slots = max(1, len(rows))


def test_buffers_are_replaced_only_now_and_then() -> None:
    cache = SlotCache(slots=2)
    cache.put([0, 1], prefilled(2, 5, seed=0), [0, 1], length=5)
    addresses = []
    for step in range(400):
        cache.extend(5 + step)
        addresses.append(cache.buffers[0].data_ptr())
    assert sum(a != b for a, b in itertools.pairwise(addresses)) <= 6
