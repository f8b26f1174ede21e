from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.engine.microbatch import split_micro_batches

PROMPT_WIDTH, RESPONSE_WIDTH = 20, 30


def mask_of(lengths: list[tuple[int, int]]) -> Tensor:
    """Rows of (prompt, response) lengths, prompts to the left and responses to the right of one column."""
    mask = torch.zeros(len(lengths), PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.int64)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, PROMPT_WIDTH - prompt : PROMPT_WIDTH + response] = 1
    return mask


def cost(lengths: list[tuple[int, int]], rows: list[int], *, packed: bool) -> int:
    """The tokens that the model computes for these rows."""
    chosen = [lengths[row] for row in rows]
    if packed:
        return sum(prompt + response for prompt, response in chosen)
    return len(chosen) * (max(prompt for prompt, _ in chosen) + max(response for _, response in chosen))


def split(lengths: list[tuple[int, int]], max_tokens: int, *, packed: bool, ranks: int = 0) -> list[list[int] | None]:
    """`ranks`: another rank needs so many micro-batches."""
    parts = split_micro_batches(
        mask_of(lengths), None, max_tokens, packed=packed, largest=lambda count: max(count, ranks)
    )
    return [None if part is None else part.tolist() for part in parts]


def test_by_rows_all_are_taken_in_order() -> None:
    parts = split_micro_batches(mask_of([(1, 1)] * 5), 2, None)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4]]


def test_a_rank_with_fewer_micro_batches_than_another_has_passes_without_rows() -> None:
    parts = split_micro_batches(mask_of([(1, 1)] * 3), 2, None, largest=lambda count: 4)
    assert [None if part is None else part.tolist() for part in parts] == [[0, 1], [2], None, None]


@pytest.mark.parametrize(("size", "max_tokens"), [(0, None), (None, 0), (None, None), (2, 2)])
def test_limits_that_make_no_sense_are_errors(size: int | None, max_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="micro-batch"):
        split_micro_batches(mask_of([(1, 1)]), size, max_tokens)


@pytest.mark.parametrize("sizes", [(1, None), (None, 1)])
def test_a_batch_without_rows_is_an_error(sizes: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="no rows"):
        split_micro_batches(mask_of([]), *sizes)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, PROMPT_WIDTH), st.integers(0, RESPONSE_WIDTH)), min_size=1, max_size=30),
    max_tokens=st.integers(1, 200),
    packed=st.booleans(),
    ranks=st.integers(0, 8),
)
def test_by_tokens_every_row_is_in_one_micro_batch_that_keeps_the_limit_or_holds_it_alone(
    lengths: list[tuple[int, int]], max_tokens: int, packed: bool, ranks: int
) -> None:
    parts = split(lengths, max_tokens, packed=packed, ranks=ranks)
    own = [part for part in parts if part is not None]
    assert sorted(row for part in own for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or cost(lengths, part, packed=packed) <= max_tokens for part in own)
    assert len(parts) >= ranks


def test_packed_rows_count_their_tokens_and_padded_rows_the_padding_too() -> None:
    # The longest prompt and the longest response are not in the same row.
    lengths = [(20, 1), (1, 20)]
    assert split(lengths, 42, packed=True) == [[0, 1]]
    assert split(lengths, 79, packed=False) == [[0], [1]]
    assert split(lengths, 80, packed=False) == [[0, 1]]


def test_micro_batches_have_about_equal_work() -> None:
    """Filled one after the other to 100 tokens, they would have 100, 100 and 10."""
    parts = split([(5, 5)] * 21, 100, packed=True)
    assert [len(part) for part in parts] == [7, 7, 7]


def test_a_rank_splits_its_rows_into_as_many_as_another_rank_needs() -> None:
    parts = split([(5, 5)] * 6, 100, packed=True, ranks=3)
    assert [len(part) for part in parts] == [2, 2, 2]


def test_a_rank_with_too_few_rows_has_passes_without_rows() -> None:
    assert split([(5, 5), (5, 6)], 100, packed=False, ranks=3) == [[1], [0], None]


def test_rows_that_attend_to_nothing_have_a_place_too() -> None:
    assert sorted(split([(0, 0), (0, 0), (3, 3)], 7, packed=True)) == [[0, 1], [2]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [{"size": 2, "max_tokens": None}, {"size": None, "max_tokens": 9}])
def test_rows_of_a_group_stay_together_and_in_their_order(packed: bool, size: dict[str, int | None]) -> None:
    lengths = torch.tensor([1, 2, 6, 3, 2, 2, 1, 5])
    attention_mask = (torch.arange(6) >= 6 - lengths[:, None]).long()
    parts = split_micro_batches(attention_mask, **size, rows_per_group=2, packed=packed)
    rows = [part.view(-1, 2).tolist() for part in parts if part is not None]
    assert sorted(pair for part in rows for pair in part) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    if size["max_tokens"]:
        for part in parts:
            assert part is not None
            tokens = int(lengths[part].sum()) if packed else int(lengths[part].max()) * len(part)
            assert tokens <= 9 or len(part) == 2
