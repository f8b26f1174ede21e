"""Keys and values of the rows that decode together.

transformers' DynamicCache copies the whole cache to append one token, which costs more than the attention itself.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache


class SlotCache(Cache):
    """Keys and values of rows that come and go, in buffers (slots, heads, columns, head_dim), two per layer.

    All rows end at the same column, whatever their lengths:

        slot 0      . p p p r r r
        slot 1      . . . . p r r       p: prompt, r: response, .: hidden from attention
        slot 2      p p p p p p r
                    start          end

    So a step writes one column, and a distance between columns is a distance between positions, as transformers' masks
    suppose, sliding windows too; rotary positions are in the keys already. `start` follows the longest row. A buffer
    that is full to its last column is replaced by one that holds the columns from `start` on and has room behind.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        """Rows of the next buffers."""
        self.start = self.end = 0
        self.buffers: list[torch.Tensor] = []  # keys and values of layer 0, of layer 1, ...

    def put(self, slots: list[int], prompts: DynamicCache, sources: list[int], length: int) -> None:
        """Copy the last `length` positions of row sources[i] of a prefill to slots[i]."""
        computed = [tensor for keys, values, _ in prompts for tensor in (keys, values)]
        if not self.buffers:
            # Not the keys' dtype: under autocast rotary embeddings leave them in float32, and attention would cast all
            # of them at each step.
            dtype = computed[1].dtype
            self.buffers = [like.new_empty(0, like.shape[1], 0, like.shape[3], dtype=dtype) for like in computed]
        if length > self.end or max(slots) >= len(self.buffers[0]):
            self._make_room(length)
        self.start = min(self.start, self.end - length)
        into, source = self._index(slots), self._index(sources)
        for buffer, tensor in zip(self.buffers, computed, strict=True):
            buffer[into, :, self.end - length : self.end] = tensor[source, :, -length:].to(buffer.dtype)

    def move(self, sources: list[int], slots: list[int]) -> None:
        """Copy rows to other slots."""
        into, source = self._index(slots), self._index(sources)
        for buffer in self.buffers:
            buffer[into, :, self.start : self.end] = buffer[source, :, self.start : self.end]

    def extend(self, longest: int) -> None:
        """Begin a step, which appends one position to all rows; the longest has so many by now."""
        self.start = self.end - longest
        if self.end == self.buffers[0].shape[2]:
            self._make_room(longest)
        self.end += 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model: write the new position of the first rows; returns views of all their positions."""
        rows = len(key_states)
        keys, values = self.buffers[2 * layer_idx : 2 * layer_idx + 2]
        keys[:rows, :, self.end - 1 : self.end] = key_states
        values[:rows, :, self.end - 1 : self.end] = value_states
        return keys[:rows, :, self.start : self.end], values[:rows, :, self.start : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Called by the model: the positions before the step, padding included."""
        return self.end - 1 - self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called by the model: how many columns `update` returns, and which is the first."""
        return self.end - self.start, 0

    def _make_room(self, length: int) -> None:
        """New buffers with at least `length` columns in use: a quarter more bounds both the copying and the waste."""
        used = self.end - self.start
        end = max(length, used)
        for index, old in enumerate(self.buffers):
            # Zeros, since attention multiplies hidden columns by 0, and 0 * NaN would be NaN.
            new = old.new_zeros(self.slots, old.shape[1], end + max(64, end // 4), old.shape[3])
            new[: len(old), :, end - used : end] = old[: self.slots, :, self.start : self.end]
            self.buffers[index] = new
        self.start, self.end = end - used, end

    def _index(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self.buffers[0].device)
