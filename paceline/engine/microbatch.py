"""Which rows of a mini-batch go through the model together: so many rows, or so many tokens.

The tokens of a micro-batch are those that the model computes: with packing the sum of its rows' tokens, without it
rows x (longest prompt + longest response), padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def split_micro_batches(
    attention_mask: Tensor,
    size: int | None,
    max_tokens: int | None,
    *,
    rows_per_group: int = 1,
    packed: bool = False,
    largest: Callable[[int], int] = lambda count: count,
) -> list[Tensor | None]:
    """Row numbers of each micro-batch of `size` rows or of at most `max_tokens` tokens, whichever is given.

    By tokens, micro-batches have about equal work, longest rows first; a row that is longer than that is alone. So many
    consecutive rows as a group has stay together, in their order, and `size` counts groups.
    `attention_mask` is (batch, length). A forward pass may be collective: `largest` returns the largest count of any
    rank. Rows are split into that many micro-batches; if there are too few rows, None stands for a pass without rows.
    """
    if (size is None) == (max_tokens is None):
        raise ValueError(f"give the micro-batch size or max_tokens; got {size} and {max_tokens}.")
    if (limit := size or max_tokens or 0) < 1:
        raise ValueError(f"a micro-batch of {limit} {'rows' if max_tokens is None else 'tokens'}; set it to 1 or more.")
    if len(attention_mask) % rows_per_group:
        raise ValueError(f"{len(attention_mask)} rows are no whole number of groups of {rows_per_group}.")
    if len(attention_mask) == 0:
        raise ValueError("the batch has no rows; give every rank at least one.")
    if size is not None:
        parts = list(torch.arange(len(attention_mask)).split(size * rows_per_group))
        count = largest(len(parts))
    else:
        rows = sorted(_rows(attention_mask, rows_per_group), key=lambda row: -row.tokens)
        count = largest(len(_fill(rows, limit, packed)))
        parts = [torch.tensor(group) for group in _balanced(rows, count, limit, packed)]
        parts = [(part[:, None] * rows_per_group + torch.arange(rows_per_group)).flatten() for part in parts]
    return [*parts, *[None] * (count - len(parts))]


def _balanced(rows: Sequence[_Row], count: int, limit: int, packed: bool) -> list[list[int]]:
    """The rows in at most `count` groups as equal as they get: by the smallest limit that gives no more."""
    if count >= len(rows):
        return [[row.number] for row in rows]
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if len(_fill(rows, middle, packed)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(rows, low, packed)


@dataclass(frozen=True)
class _Row:
    """A row, or a group of rows that stay together."""

    number: int
    start: int
    """First column that it attends to."""
    end: int
    """One after the last."""
    tokens: int
    rows: int = 1


def _rows(attention_mask: Tensor, rows_per_group: int) -> list[_Row]:
    width = attention_mask.shape[-1]
    attended = attention_mask.bool()
    columns = torch.arange(width, device=attention_mask.device)
    starts = torch.where(attended, columns, width - 1).amin(dim=-1).tolist()
    ends = (torch.where(attended, columns, 0).amax(dim=-1) + 1).tolist()
    # A row that attends to nothing still takes a token through the model.
    tokens = attended.sum(dim=-1).clamp(min=1).tolist()
    single = [
        _Row(number, min(start, end - 1), end, count)
        for number, (start, end, count) in enumerate(zip(starts, ends, tokens, strict=True))
    ]
    if rows_per_group == 1:
        return single
    groups = (single[first : first + rows_per_group] for first in range(0, len(single), rows_per_group))
    return [
        _Row(
            number,
            min(row.start for row in group),
            max(row.end for row in group),
            sum(row.tokens for row in group),
            rows_per_group,
        )
        for number, group in enumerate(groups)
    ]


def _fill(rows: Sequence[_Row], limit: int, packed: bool) -> list[list[int]]:
    """Each group takes rows in order as long as it keeps within `limit` tokens."""
    groups: list[list[int]] = []
    start = end = tokens = 0
    for row in rows:
        joint = (min(start, row.start), max(end, row.end), tokens + row.tokens)
        size = joint[2] if packed else (joint[1] - joint[0]) * row.rows * (len(groups[-1]) + 1 if groups else 1)
        if groups and size <= limit:
            groups[-1].append(row.number)
            start, end, tokens = joint
        else:
            groups.append([row.number])
            start, end, tokens = row.start, row.end, row.tokens
    return groups
