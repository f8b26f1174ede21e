"""What DataProto promises: views and copies, errors that name the column, and operations that undo each other."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from paceline.errors import DataError
from paceline.protocol import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto
from tests.batches import make, memory, row_numbers

few = settings(max_examples=25, deadline=None)


# Construction


def test_from_single_dict_sorts_columns_by_type_and_copies_nothing():
    ids, uid = torch.zeros(2, 3), np.array(["a", "b"], dtype=object)
    data = DataProto.from_single_dict({"ids": ids, "uid": uid, "messages": [[1], [2]]}, meta_info={"step": 1})
    assert data.batch["ids"] is ids
    assert data.non_tensor_batch["uid"] is uid
    assert data.non_tensor_batch["messages"].shape == (2,)
    assert data.meta_info == {"step": 1}


def test_lists_of_equal_length_stay_one_cell_per_row():
    data = DataProto.from_dict(non_tensors={"answers": [["a", "b"], ["c", "d"]]})
    assert data.non_tensor_batch["answers"].shape == (2,)
    assert data[1].non_tensor_batch["answers"] == ["c", "d"]


def test_from_tensordict_holds_the_very_tensordict():
    tensors = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    assert DataProto.from_tensordict(tensors).batch is tensors


def test_a_batch_without_columns_has_no_rows_but_carries_meta_info():
    data = DataProto(meta_info={"step": 3})
    assert len(data) == 0
    assert not data
    assert [chunk.meta_info for chunk in data.chunk(2)] == [{"step": 3}] * 2
    assert DataProto.concat(data.chunk(2)).meta_info == {"step": 3}
    assert pickle.loads(pickle.dumps(data)).batch is None


# Rows


def test_an_int_gives_one_row_without_the_batch_dimension():
    data = make(4, step=1)
    item = data[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [30, 31, 32]
    assert item.batch["scores"].shape == ()
    assert item.non_tensor_batch["uid"] == "row3"
    assert item.non_tensor_batch["extra"] is data.non_tensor_batch["extra"][3]
    assert item.meta_info == {"step": 1}
    assert data[np.int64(3)].non_tensor_batch["uid"] == "row3"
    assert [row.non_tensor_batch["uid"] for row in data] == ["row0", "row1", "row2", "row3"]


def test_a_slice_is_a_view_of_tensors_and_arrays():
    data = make(6)
    part = data[2:5]
    assert row_numbers(part) == [2, 3, 4]
    part.batch["ids"][0] = -1
    part.non_tensor_batch["weight"][0] = -1
    assert data.batch["ids"][2].tolist() == [-1, -1, -1]
    assert data.non_tensor_batch["weight"][2] == -1


@pytest.mark.parametrize(
    "rows",
    [
        [1, 3],
        (1, 3),
        [-3, -1],
        np.array([1, 3]),
        torch.tensor([1, 3]),
        [False, True, False, True],
        np.array([0, 1, 0, 1]) > 0,
    ],
)
def test_chosen_rows_are_a_copy(rows):
    data = make(4)
    part = data[rows]
    assert row_numbers(part) == [1, 3]
    part.batch["ids"].fill_(-1)
    part.non_tensor_batch["weight"].fill(-1)
    assert row_numbers(data) == [0, 1, 2, 3]


@few
@given(rows=st.integers(0, 9), bounds=st.slices(9))
def test_slices_choose_the_rows_that_lists_do(rows, bounds):
    data = make(rows)
    assert row_numbers(data[bounds]) == list(range(rows))[bounds]
    assert row_numbers(data.slice(bounds.start, bounds.stop, bounds.step)) == list(range(rows))[bounds]


def test_no_row_chosen_is_an_empty_batch_with_all_columns():
    for rows in ([], slice(0, 0), np.zeros(4, dtype=bool), torch.tensor([], dtype=torch.int64)):
        empty = make(4)[rows]
        assert row_numbers(empty) == []
        assert empty.batch["ids"].shape == (0, 3)


# Chunk, split, concat, repeat, reorder, pad


@few
@given(chunks=st.integers(1, 5), size=st.integers(0, 4))
def test_concat_undoes_chunk(chunks, size):
    data = make(chunks * size, step=1, nested={"a": [1, {"b": float("nan")}]})
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks
    whole = DataProto.concat(parts)
    assert row_numbers(whole) == list(range(chunks * size))
    assert whole.meta_info == data.meta_info


@few
@given(rows=st.integers(0, 9), size=st.integers(1, 10))
def test_split_gives_pieces_in_order_the_last_one_shorter(rows, size):
    pieces = make(rows).split(size)
    assert [n for piece in pieces for n in row_numbers(piece)] == list(range(rows))
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces[-1:])


def test_chunks_are_views_with_their_own_meta_dictionary():
    data = make(4, shared=[1])
    first, second = data.chunk(2)
    assert memory(second) == [tensor[2:].data_ptr() for tensor in data.batch.values()]
    first.meta_info["mine"] = 1
    first.meta_info["shared"].append(2)
    assert second.meta_info == data.meta_info == {"shared": [1, 2]}


def test_rows_that_do_not_divide_are_an_error_that_names_the_remedy():
    with pytest.raises(DataError, match=r"5 rows can't be divided into 2 .*pad_dataproto_to_divisor\(data, 2\)"):
        make(5).chunk(2)


def test_concat_copies_several_batches_and_shares_the_only_one_that_has_rows():
    one, two = make(2), make(2, start=2)
    joined = DataProto.concat([one, two])
    joined.batch["ids"].fill_(-1)
    assert row_numbers(one) == [0, 1]
    for parts in ([one], [make(0), one, make(0)], [one, DataProto()]):
        assert memory(DataProto.concat(parts)) == memory(one)
    with pytest.raises(DataError, match=r"only in part 0: \['mask'"):
        DataProto.concat([one, make(0).select(["ids"])])


def test_concat_takes_empty_batches_and_keeps_object_cells():
    joined = DataProto.concat([make(0), make(2), make(0), make(1, start=2)])
    assert row_numbers(joined) == [0, 1, 2]
    assert joined.non_tensor_batch["extra"].dtype == object


def test_concat_lets_batches_without_columns_give_only_their_meta_info():
    joined = DataProto.concat([DataProto(meta_info={"step": 1}), make(2), DataProto(meta_info={"metrics": {"a": 1}})])
    assert row_numbers(joined) == [0, 1]
    assert joined.meta_info == {"step": 1, "metrics": {"a": [1]}}


def test_concat_of_nothing_or_of_other_things_is_refused():
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])
    with pytest.raises(TypeError, match="got a dict"):
        DataProto.concat([make(1), {}])


@few
@given(rows=st.integers(0, 5), times=st.integers(1, 4))
def test_repeat_keeps_neighbours_together_or_repeats_the_whole(rows, times):
    data = make(rows)
    assert row_numbers(data.repeat(times)) == [row for row in range(rows) for _ in range(times)]
    assert row_numbers(data.repeat(times, interleave=False)) == list(range(rows)) * times


def test_repeat_copies_even_once():
    data = make(2)
    data.repeat(1).batch["ids"].fill_(-1)
    assert row_numbers(data) == [0, 1]
    with pytest.raises(ValueError, match="repeat_times is 0"):
        data.repeat(0)


@few
@given(order=st.integers(0, 7).flatmap(lambda rows: st.permutations(range(rows))))
def test_reordering_back_restores_the_batch(order):
    data = make(len(order))
    assert data.reorder(order) is data
    assert row_numbers(data) == list(order)
    assert row_numbers(data.reorder(torch.tensor(order, dtype=torch.int64).argsort())) == list(range(len(order)))


def test_reorder_refuses_what_is_no_permutation_and_changes_nothing():
    data = make(3)
    for order in ([0, 1], [0, 1, 1]):
        with pytest.raises(DataError, match="each of the 3 rows exactly once"):
            data.reorder(order)
    assert row_numbers(data) == [0, 1, 2]


def test_reorder_leaves_views_taken_before_as_they_were():
    data = make(3)
    view = data[:]
    data.reorder([2, 1, 0])
    assert row_numbers(view) == [0, 1, 2]


@few
@given(rows=st.integers(0, 9), divisor=st.integers(1, 12))
def test_unpad_undoes_pad(rows, divisor):
    data = make(rows, step=1, metrics={"loss": 1})
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert row_numbers(padded) == [row % rows for row in range(rows + pad_size)]
    assert padded.meta_info == data.meta_info
    assert row_numbers(unpad_dataproto(padded, pad_size)) == list(range(rows))


def test_nothing_to_pad_or_unpad_gives_the_batch_itself_and_unpadding_is_a_view():
    data = make(4)
    assert pad_dataproto_to_divisor(data, 2) == (data, 0)
    assert unpad_dataproto(data, 0) is data
    assert memory(unpad_dataproto(data, 1)) == memory(data)
    with pytest.raises(DataError, match="can't remove 5 rows"):
        unpad_dataproto(data, 5)


# Columns


def test_select_is_a_view_and_none_means_all():
    data = make(2, a=1, b=2)
    part = data.select(["ids"], ["uid"], ["a"])
    assert list(part.batch.keys()) == ["ids"]
    assert part.batch["ids"] is data.batch["ids"]
    assert list(part.non_tensor_batch) == ["uid"]
    assert part.meta_info == {"a": 1}
    assert row_numbers(data.select()) == [0, 1]
    assert data.select().meta_info == {"a": 1, "b": 2}
    assert len(data.select([], [])) == 2


def test_pop_moves_columns_and_none_means_none():
    data = make(2, a=1, b=2)
    tensors = data.batch
    popped = data.pop(["ids", "scores"], ["uid"], ["a"])
    assert list(popped.batch.keys()) == ["ids", "scores"]
    assert list(data.batch.keys()) == ["mask"]
    assert list(popped.non_tensor_batch) == ["uid"]
    assert list(data.non_tensor_batch) == ["extra", "weight"]
    assert (popped.meta_info, data.meta_info) == ({"a": 1}, {"b": 2})
    assert "ids" in tensors, "the TensorDict from before is left alone"
    assert len(data.pop()) == 2


def test_popping_the_last_tensor_leaves_a_batch_that_takes_new_ones():
    data = DataProto.from_dict({"x": torch.zeros(2)})
    data.pop(["x"])
    assert len(data) == 2
    data.batch["y"] = torch.ones(2)
    assert len(pickle.loads(pickle.dumps(data)).batch["y"]) == 2


def test_rename_takes_one_or_several_columns_of_both_kinds():
    data = make(2)
    assert data.rename("ids", "input_ids") is data
    data.rename(["scores", "mask", "uid"], ["mask", "scores", "group"])
    assert list(data.batch.keys()) == ["input_ids", "mask", "scores"]
    assert data.batch["mask"].dtype == torch.bfloat16
    assert "group" in data.non_tensor_batch
    with pytest.raises(DataError, match="two columns the name 'mask'"):
        data.rename("input_ids", "mask")
    with pytest.raises(DataError, match="no column 'ids'"):
        data.rename("ids", "x")
    with pytest.raises(ValueError, match="one new name for each"):
        data.rename(["mask", "scores"], ["a"])


def test_union_adds_columns_to_this_batch_without_a_copy():
    data, other = make(2, a=1), DataProto.from_dict({"values": torch.ones(2)}, {"tag": ["x", "y"]}, {"b": 2})
    tensors = data.batch
    assert data.union(other) is data
    assert row_numbers(data) == [0, 1]
    assert data.batch["values"] is other.batch["values"]
    assert data.non_tensor_batch["tag"] is other.non_tensor_batch["tag"]
    assert data.meta_info == {"a": 1, "b": 2}
    assert "values" not in tensors, "the TensorDict from before is left alone"


def test_union_refuses_a_name_that_is_a_tensor_on_one_side_only():
    data = DataProto.from_dict({"x": torch.zeros(1)})
    with pytest.raises(DataError, match="'x' is both in batch and in non_tensor_batch"):
        data.union(DataProto.from_dict(non_tensors={"x": ["a"]}))
    assert not data.non_tensor_batch


def test_union_of_unequal_batch_sizes_is_an_error_unless_one_has_no_columns():
    with pytest.raises(DataError, match="3 and 2 rows"):
        make(3).union(make(2))
    with pytest.raises(DataError, match="0 and 2 rows"):
        make(0).union(make(2))
    assert row_numbers(make(2).union(DataProto(meta_info={"step": 1}))) == [0, 1]
    assert row_numbers(DataProto().union(make(2))) == [0, 1]
    texts = DataProto.from_dict(non_tensors={"text": ["a", "b"]})
    assert len(texts.union(DataProto.from_dict({"x": torch.zeros(2)})).batch["x"]) == 2


def test_clone_and_deepcopy_share_nothing():
    for twin in (copy.deepcopy, DataProto.clone):
        data = make(2, nested={"a": [1]})
        other = twin(data)
        other.batch["ids"].fill_(-1)
        other.non_tensor_batch["extra"][0]["n"] = -1
        other.meta_info["nested"]["a"].append(2)
        assert row_numbers(data) == [0, 1]
        assert data.meta_info == {"nested": {"a": [1]}}


def test_a_shallow_copy_shares_columns_but_not_the_containers():
    data = make(2)
    other = copy.copy(data)
    assert memory(other) == memory(data)
    other.pop(["mask"])
    assert row_numbers(data) == [0, 1]


def test_to_moves_tensors_in_this_batch_and_copies_none_that_is_there():
    data = make(2)
    before, tensors = memory(data), data.batch
    assert data.to("cpu") is data
    assert memory(data) == before
    data.to("meta")
    assert {tensor.device.type for tensor in data.batch.values()} == {"meta"}
    assert data[:1].batch.device.type == "meta"
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}


# Mini-batches


def test_make_iterator_gives_every_row_once_an_epoch():
    batches = list(make(6, step=1).make_iterator(2, epochs=2))
    assert [row_numbers(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(batch.meta_info == {"step": 1} for batch in batches)


def test_make_iterator_shuffles_by_seed_and_anew_each_epoch():
    def order(seed: int) -> list[int]:
        batches = make(8).make_iterator(4, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True})
        return [row for batch in batches for row in row_numbers(batch)]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)[:8]) == sorted(order(1)[8:]) == list(range(8))
    assert order(1)[:8] != order(1)[8:]


@pytest.mark.parametrize(("seed", "shuffle"), [(None, False), (1, False), (1, True)])
def test_make_iterator_leaves_the_global_random_state_alone(seed, shuffle):
    before = torch.get_rng_state()
    list(make(4).make_iterator(2, epochs=1, seed=seed, dataloader_kwargs={"shuffle": shuffle}))
    assert torch.equal(torch.get_rng_state(), before)


def test_make_iterator_needs_a_size_that_divides_at_once_and_takes_an_empty_batch():
    with pytest.raises(DataError, match="mini-batches of 4, but the batch has 6 rows"):
        make(6).make_iterator(4, epochs=1)
    assert list(make(0).make_iterator(4, epochs=1, dataloader_kwargs={"shuffle": True})) == []
