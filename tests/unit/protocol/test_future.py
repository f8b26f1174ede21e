"""What a future of a batch promises: nothing is fetched before it is asked for, and chunks stay lazy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.protocol import DataProto, DataProtoFuture, unpad_dataproto
from tests.batches import make, row_numbers


def remove_last_row(values: list[DataProto]) -> DataProto:
    return unpad_dataproto(DataProto.concat(values), 1)


def future_of(*sizes: int) -> tuple[DataProtoFuture, list[str]]:
    """A future over named parts of these sizes, and the log of what was fetched."""
    starts = np.cumsum([0, *sizes])
    store = {f"ref{i}": make(size, start=int(starts[i])) for i, size in enumerate(sizes)}
    fetched: list[str] = []

    def getter(parts):
        fetched.extend(parts)
        return [store[part] for part in parts]

    return DataProtoFuture(list(store), remove_last_row, getter), fetched


def test_a_future_collects_its_parts_when_asked():
    future, fetched = future_of(3, 4)
    assert fetched == []
    assert row_numbers(future.get()) == [0, 1, 2, 3, 4, 5]
    assert fetched == ["ref0", "ref1"]


def test_chunks_of_a_future_are_lazy_and_tell_their_selection():
    future, fetched = future_of(3, 4)
    chunks = future.chunk(3)
    assert [chunk.selection for chunk in chunks] == [(0, 3), (1, 3), (2, 3)]
    assert all(chunk.parts == ["ref0", "ref1"] for chunk in chunks)
    assert fetched == []
    assert [row_numbers(chunk.get()) for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]
    assert [row_numbers(half.get()) for half in chunks[1].chunk(2)] == [[2], [3]]


def test_a_pickled_resolver_resolves_elsewhere_without_references_or_getter():
    future, fetched = future_of(3, 4)
    values = future.getter(future.parts)
    fetched.clear()
    joined = DataProtoFuture.concat([future.chunk(2)[1], future])
    resolver = pickle.loads(pickle.dumps(joined.chunk(3)[0].resolver))
    assert row_numbers(resolver(values * 2)) == [3, 4, 5]
    assert row_numbers(joined.chunk(3)[0].resolver(values * 2)) == [3, 4, 5]
    assert fetched == []


def test_futures_concatenate_lazily_in_order():
    one, _ = future_of(2, 2)
    joined = DataProtoFuture.concat([one.chunk(3)[2], one.chunk(3)[0]])
    assert joined.parts == ["ref0", "ref1"] * 2
    assert joined.selection is None
    assert row_numbers(joined.get()) == [2, 0]
    with pytest.raises(ValueError, match="empty list"):
        DataProtoFuture.concat([])


def test_concatenated_futures_wait_each_with_its_own_getter():
    one, fetched_by_one = future_of(2, 2)
    two, fetched_by_two = future_of(5)
    assert row_numbers(DataProtoFuture.concat([one, two]).get()) == [0, 1, 2, 0, 1, 2, 3]
    assert (fetched_by_one, fetched_by_two) == (["ref0", "ref1"], ["ref0"])


def test_then_waits_and_applies_once_when_asked():
    future, fetched = future_of(3, 4)
    calls = []

    def reverse(data: DataProto) -> DataProto:
        calls.append(len(data))
        return data[::-1]

    reversed_rows = future.then(reverse)
    assert (fetched, calls) == ([], [])
    result = reversed_rows.get()
    assert row_numbers(result) == [5, 4, 3, 2, 1, 0]
    assert reversed_rows.get() is result
    assert (fetched, calls) == (["ref0", "ref1"], [6])


def test_a_future_of_then_chains_chunks_and_concatenates():
    future, fetched = future_of(3, 4)
    last = future.then(lambda data: data[2:]).then(lambda data: data[1:])
    joined = DataProtoFuture.concat([last.chunk(3)[2], future, DataProtoFuture.of(make(1, start=9))])
    assert fetched == []
    assert row_numbers(joined.get()) == [5, 0, 1, 2, 3, 4, 5, 9]
    assert last.then(len).get() == 3  # what the function gives need not be a batch


def test_errors_pass_through_then_and_the_next_get_tries_again():
    attempts = []

    def fails_once(data: DataProto) -> int:
        attempts.append(len(data))
        if len(attempts) == 1:
            raise ValueError("not yet")
        return len(data)

    lost = DataProtoFuture(["gone"], remove_last_row, lambda parts: {}[parts[0]])
    with pytest.raises(KeyError, match="gone"):
        lost.then(len).get()
    later = future_of(3)[0].then(fails_once)
    with pytest.raises(ValueError, match="not yet"):
        later.get()
    assert [later.get(), later.get(), attempts] == [2, 2, [2, 2]]


def test_rows_of_a_future_that_do_not_divide_are_an_error_when_resolved():
    chunk = future_of(3, 3)[0].chunk(2)[0]
    with pytest.raises(DataError, match="5 rows can't be divided into 2"):
        chunk.get()
    with pytest.raises(ValueError, match="chunks is 0"):
        future_of(1)[0].chunk(0)
