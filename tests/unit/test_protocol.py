"""What DataProto promises: views and copies, errors that name the column, and operations that undo each other."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tensordict import TensorDict

from paceline.errors import DataError
from paceline.protocol import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    disk,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

few = settings(max_examples=25, deadline=None)


def make(rows: int, start: int = 0, **meta) -> DataProto:
    """A batch in which every cell tells its row."""
    numbers = torch.arange(start, start + rows)
    return DataProto.from_dict(
        tensors={
            "ids": numbers[:, None] * 10 + torch.arange(3),
            "scores": numbers.to(torch.bfloat16),
            "mask": numbers % 2 == 0,
        },
        non_tensors={
            "uid": [f"row{n}" for n in numbers.tolist()],
            "extra": [{"n": n, "options": [n] * 2} for n in numbers.tolist()],
            "weight": numbers.numpy().astype(np.float32),
        },
        meta_info=meta,
    )


def row_numbers(data: DataProto) -> list[int]:
    """The rows that a `make` batch holds, after a check that all its columns agree."""
    numbers = (data.batch["ids"][:, 0] // 10).tolist()
    assert data.batch["ids"].tolist() == [[n * 10, n * 10 + 1, n * 10 + 2] for n in numbers]
    assert data.batch["scores"].dtype == torch.bfloat16
    assert data.batch["scores"].tolist() == numbers
    assert data.batch["mask"].tolist() == [n % 2 == 0 for n in numbers]
    assert data.non_tensor_batch["uid"].tolist() == [f"row{n}" for n in numbers]
    assert [cell["n"] for cell in data.non_tensor_batch["extra"]] == numbers
    assert data.non_tensor_batch["weight"].tolist() == numbers
    assert len(data) == len(numbers)
    return numbers


def memory(data: DataProto) -> list[int]:
    return [tensor.data_ptr() for tensor in data.batch.values()]


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


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}),
            DataError,
            r"'a': \(2,\), 'b': \(3,\)",
        ),
        (lambda: DataProto.from_dict({"a": torch.zeros(())}), DataError, "same number of rows"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["x"]}), DataError, "'u' has shape .* 2 rows"),
        (lambda: DataProto.from_dict({}, {"u": ["x"], "v": ["x", "y"]}), DataError, "'v' has shape"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), TypeError, "'a' is a list"),
        (lambda: DataProto.from_dict({}, {"u": "text"}), TypeError, "'u' is a str"),
        (lambda: DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]}), DataError, "'a' is both"),
        (lambda: DataProto({"a": torch.zeros(2)}), TypeError, "not a TensorDict"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), DataError, r"\[2, 3\]"),
        (lambda: DataProto(TensorDict({"n": {"x": torch.zeros(2)}}, batch_size=[2])), TypeError, "nested"),
        (lambda: DataProto(None, {"u": ["x"]}), TypeError, "not a numpy array"),
    ],
)
def test_columns_that_make_no_batch_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_column_of_wrong_length_added_later_is_found_by_the_next_operation():
    data = make(4)
    data.non_tensor_batch["late"] = np.zeros(3)
    with pytest.raises(DataError, match="'late'"):
        data.chunk(2)
    with pytest.raises(DataError, match="'late'"):
        pickle.dumps(data)


def test_repr_and_nbytes_tell_the_size_without_the_content():
    data = make(4, temperature=1.0)
    assert data.nbytes == 4 * 3 * 8 + 4 * 2 + 4 * 1 + 4 * 4
    assert repr(data) == (
        "DataProto(4 rows, 124 B | ids int64(4, 3) | scores bfloat16(4) | mask bool(4) | uid object(4) | "
        "extra object(4) | weight float32(4) | meta temperature)"
    )
    assert "16.0 MB" in repr(DataProto.from_dict({"x": torch.zeros(2000, 2000)}))


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


@pytest.mark.parametrize("row", [4, -5])
def test_a_row_outside_the_batch_is_an_index_error(row):
    for rows in (row, [row], torch.tensor([0, row])):
        with pytest.raises(IndexError, match=f"row {row} of a batch with 4 rows"):
            make(4)[rows]


@pytest.mark.parametrize("rows", ["ids", 1.5, [0.5], [[0]], True, None])
def test_what_is_not_a_choice_of_rows_is_refused(rows):
    with pytest.raises(TypeError, match="rows are chosen by"):
        make(4)[rows]


def test_a_mask_needs_one_truth_value_per_row():
    with pytest.raises(IndexError, match="3 truth values for a batch with 4 rows"):
        make(4)[[True, False, True]]


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


def test_concat_gathers_metrics_and_refuses_other_differences_of_meta_info():
    parts = [make(1, step=1, metrics={"loss": 0.5}), make(1, step=1, metrics=[{"loss": 0.1}, {"loss": 0.2}]), make(1)]
    assert DataProto.concat(parts).meta_info == {"step": 1, "metrics": {"loss": [0.5, 0.1, 0.2]}}
    with pytest.raises(DataError, match=r"meta info key 'step' .* 1 and 2"):
        DataProto.concat([make(1, step=1), make(1, step=2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop(["mask"]), r"only in part 0: \['mask'\], only in part 1: \[\]"),
        (lambda data: data.pop(non_tensor_batch_keys=["uid"]), r"only in part 0: \['uid'\]"),
        (lambda data: data.batch.set("ids", data.batch["ids"].int()), "'ids': part 0 has torch.int64 .* torch.int32"),
        (lambda data: data.batch.set("ids", data.batch["ids"][:, :2]), r"'ids': .*\(3,\).*\(2,\)"),
        (lambda data: data.non_tensor_batch.update(uid=np.zeros(2)), "'uid': part 0 has object .* float64"),
    ],
)
def test_concat_of_columns_that_differ_names_the_column(change, message):
    other = make(2)
    change(other)
    with pytest.raises(DataError, match=message):
        DataProto.concat([make(2), other])


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


def test_a_missing_name_is_an_error_that_lists_the_known_and_changes_nothing():
    data = make(2, a=1)
    with pytest.raises(DataError, match=r"no tensor column 'idz'; there are: ids, scores, mask"):
        data.pop(["ids", "idz"])
    with pytest.raises(DataError, match=r"no non-tensor column 'ids'"):
        data.select(non_tensor_batch_keys=["ids"])
    with pytest.raises(DataError, match=r"no meta info key 'b'; there are: a"):
        data.pop(["ids"], meta_info_keys=["b"])
    with pytest.raises(TypeError, match="a list of names"):
        data.pop("ids")
    assert row_numbers(data) == [0, 1]


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


def test_union_accepts_equal_content_with_nan_nested_objects_and_arrays():
    def build() -> DataProto:
        cell = {"a": np.array([1.0, np.nan]), "b": [torch.tensor([np.nan]), {"c": float("nan")}], "d": ("x", None)}
        return DataProto.from_dict(
            {"x": torch.tensor([1.0, torch.nan]), "h": torch.tensor([torch.nan, 2]).bfloat16()},
            {"cell": [cell, "text"], "w": np.array([np.nan, 1]), "s": np.array(["a", "b"])},
            {"nested": {"t": torch.tensor([torch.nan]), "l": [1, (2, float("nan"))]}},
        )

    data = build()
    kept = data.batch["x"]
    assert data.union(build()).batch["x"] is kept


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([[1], [2]])),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (np.array([1, 2]), np.array(["1", "2"])),
        (["a", "b"], ["a", "c"]),
        ([{"a": 1}, None], [{"a": 2}, None]),
        ([{"a": 1}, None], [{"b": 1}, None]),
        ([np.array([1, 2]), 0], [np.array([1, 3]), 0]),
        ([np.array([1, 2]), 0], [np.array([1, 2, 3]), 0]),
        ([np.array([1, 2]), 0], [[1, 2], 0]),
        ([torch.tensor([1]), 0], [torch.tensor([2]), 0]),
        ([torch.tensor([1]), 0], [None, 0]),
        ([[1], 0], [(1,), 0]),
        ([[1], 0], [[1, 2], 0]),
    ],
)
def test_union_of_different_content_names_the_key_and_changes_nothing(mine, theirs):
    data = DataProto.from_single_dict({"col": mine, "first": torch.zeros(2)})
    other = DataProto.from_single_dict({"new": torch.ones(2), "col": theirs})
    with pytest.raises(DataError, match="column 'col' is on both sides with different content"):
        data.union(other)
    assert list(data.batch.keys()) + list(data.non_tensor_batch) in (["col", "first"], ["first", "col"])


def test_union_refuses_a_name_that_is_a_tensor_on_one_side_only():
    data = DataProto.from_dict({"x": torch.zeros(1)})
    with pytest.raises(DataError, match="'x' is both in batch and in non_tensor_batch"):
        data.union(DataProto.from_dict(non_tensors={"x": ["a"]}))
    assert not data.non_tensor_batch


def test_union_refuses_conflicts_of_meta_info_also_deep_inside():
    with pytest.raises(DataError, match=r"meta info key 'cfg' .*\{'a': \[1\]\} and \{'a': \[2\]\}"):
        make(1, cfg={"a": [1]}).union(make(1, cfg={"a": [2]}))


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


# Pickling


def send(data: DataProto) -> tuple[DataProto, list[memoryview]]:
    """What arrives over read-only buffers, as from Ray's object store, and these buffers."""
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    sent = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)
        try:
            return pickle.loads(inside, buffers=sent), sent
        finally:
            torch.set_warn_always(False)


def lies_in(tensor: torch.Tensor, buffers: list[memoryview]) -> bool:
    starts = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers if buffer.nbytes]
    return tensor.data_ptr() in starts


DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_out_of_band_and_is_not_copied(dtype):
    column = torch.arange(6).reshape(2, 3).to(dtype)
    received, buffers = send(DataProto.from_dict({"x": column}))
    assert received.batch["x"].dtype == dtype
    assert torch.equal(received.batch["x"].view(torch.uint8), column.view(torch.uint8))
    assert [buffer.nbytes for buffer in buffers] == [column.nbytes]
    assert lies_in(received.batch["x"], buffers)


def test_sending_reads_the_tensors_own_memory():
    data = DataProto.from_dict({"x": torch.zeros(4, 2), "h": torch.zeros(4, 2).bfloat16()}, {"w": np.zeros(4)})
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    sources = {np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers}
    assert sources == {*memory(data), data.non_tensor_batch["w"].ctypes.data}


def test_everything_of_a_batch_arrives():
    data = make(4, step=1, nested={"t": torch.ones(2).bfloat16(), "list": [torch.zeros(3), (1, "a")]})
    received, buffers = send(data)
    assert row_numbers(received) == [0, 1, 2, 3]
    assert received.meta_info["step"] == 1
    assert received.meta_info["nested"]["list"][1] == (1, "a")
    assert torch.equal(received.meta_info["nested"]["t"], torch.ones(2).bfloat16())
    assert lies_in(received.meta_info["nested"]["list"][0], buffers)
    assert not received.non_tensor_batch["weight"].flags.writeable
    assert isinstance(data.meta_info["nested"]["t"], torch.Tensor), "the sender's meta info is left alone"


def test_a_chunk_sends_only_its_own_rows():
    _, buffers = send(DataProto.from_dict({"x": torch.zeros(8, 4)}, {"w": np.zeros(8)}).chunk(4)[1])
    assert sorted(buffer.nbytes for buffer in buffers) == [2 * 8, 2 * 4 * 4]


def test_awkward_tensors_arrive_as_plain_ones():
    base = torch.arange(12.0).reshape(3, 4)
    data = DataProto.from_dict(
        {
            "transposed": base.t(),
            "expanded": torch.ones(1, 3).expand(4, 3),
            "strided": torch.arange(8)[::2],
            "grad": torch.nn.Parameter(torch.ones(4)),
            "conjugate": torch.ones(4, dtype=torch.complex64).mul(1j).conj(),
            "no_elements": torch.zeros(4, 0).bfloat16(),
        },
        {"strided_array": np.arange(8.0)[::2]},
    )
    received, buffers = send(data)
    for name, column in data.batch.items():
        assert torch.equal(received.batch[name], column), name
        assert received.batch[name].is_contiguous()
        assert not received.batch[name].requires_grad
    assert received.non_tensor_batch["strided_array"].tolist() == [0, 2, 4, 6]
    assert received.batch["no_elements"].dtype == torch.bfloat16
    assert len(buffers) == 7


def test_empty_batches_travel():
    received, _ = send(make(0))
    assert row_numbers(received) == []
    assert received.batch["ids"].shape == (0, 3)


def test_a_sparse_column_says_what_to_do():
    with pytest.raises(DataError, match="make it dense"):
        pickle.dumps(DataProto.from_dict({"x": torch.eye(2).to_sparse()}))


def test_a_received_batch_outlives_what_it_came_from():
    received, _ = send(DataProto.from_dict({"x": torch.arange(1000)}))
    column = received.batch["x"]
    del received
    assert column.sum() == 499500


def test_importing_the_protocol_imports_neither_ray_nor_transformers():
    code = "import sys, paceline.protocol; sys.exit(bool({'ray', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# Disk


def test_disk_keeps_everything_it_promises(tmp_path):
    shared = torch.arange(12.0).reshape(4, 3)
    cell = {
        "none": None,
        "list": [1, 2.5, True, "ü\n"],
        "tuple": (1, (2,)),
        "nan": float("nan"),
        "big": 2**80,
        "array": np.arange(3, dtype=np.int16),
        "scalar": np.float32(1.5),
        "text": np.str_("t"),
        "tensor": torch.ones(2).bfloat16(),
        "keys": {1: "int key", (1, 2): "tuple key"},
        "dollar": {"$tensor": "not a tag"},
        "empty": {},
    }
    data = DataProto.from_dict(
        {
            "a": shared,
            "view": shared[:, 1:],
            "h": shared.bfloat16(),
            "mask": shared > 2,
            "grad": shared.clone().requires_grad_(),
        },
        {
            "cell": [cell, None, "x", 3],
            "w": np.arange(4.0),
            "s": np.array(["a", "bb", "", "c"]),
            "two_dimensions": np.array([[1, "a"]] * 4, object),
        },
        {"step": 3, "nested": {"metrics": [{"loss": torch.tensor(0.5)}]}},
    )
    path = tmp_path / "new" / "batch.safetensors"
    data.save_to_disk(path)
    loaded = DataProto.load_from_disk(path)
    # union is an error for any difference of content, dtype, or shape
    loaded.union(data)
    assert list(loaded.batch.keys()) == list(data.batch.keys())
    assert {name: array.dtype for name, array in loaded.non_tensor_batch.items()} == {
        name: array.dtype for name, array in data.non_tensor_batch.items()
    }
    kinds = {key: type(value) for key, value in loaded.non_tensor_batch["cell"][0].items()}
    assert kinds == {key: type(value) for key, value in cell.items()}
    assert [file.name for file in path.parent.iterdir()] == ["batch.safetensors"]


@pytest.mark.parametrize(
    "data", [make(0), DataProto(), DataProto(meta_info={"a": 1}), make(2).select([], [])], ids=repr
)
def test_empty_batches_survive_the_disk(tmp_path, data):
    data.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert repr(loaded) == repr(data)
    assert (loaded.batch is None) == (data.batch is None)


def test_saving_a_chunk_writes_only_its_rows(tmp_path):
    DataProto.from_dict({"x": torch.zeros(100, 1000)}).chunk(100)[0].save_to_disk(tmp_path / "batch")
    assert (tmp_path / "batch").stat().st_size < 10_000


def test_what_can_not_be_saved_is_named_and_leaves_no_file(tmp_path):
    with pytest.raises(DataError, match=r"non_tensor_batch\.cell\[1\]\.inner holds a builtins\.set"):
        DataProto.from_dict(non_tensors={"cell": [1, {"inner": {1}}]}).save_to_disk(tmp_path / "batch")
    with pytest.raises(DataError, match=r"batch\.x has dtype torch\.complex64"):
        DataProto.from_dict({"x": torch.zeros(1, dtype=torch.complex64)}).save_to_disk(tmp_path / "batch")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_file_from_before(tmp_path, monkeypatch):
    def fail_half_way(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    make(2).save_to_disk(tmp_path / "batch")
    monkeypatch.setattr(disk, "save_file", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        make(3).save_to_disk(tmp_path / "batch")
    assert row_numbers(DataProto.load_from_disk(tmp_path / "batch")) == [0, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('the file ran code')",)


def test_files_of_others_are_refused_and_run_no_code(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(DataError, match="was not written by DataProto"):
        DataProto.load_from_disk(path)
    torch.save(Harmful(), path)
    with pytest.raises(DataError, match="was not written by DataProto"):
        DataProto.load_from_disk(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(DataError, match="format None"):
        DataProto.load_from_disk(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "absent")


# Futures


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
    assert row_numbers(joined.chunk(3)[0].resolve(values * 2)) == [3, 4, 5]
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


def test_rows_of_a_future_that_do_not_divide_are_an_error_when_resolved():
    chunk = future_of(3, 3)[0].chunk(2)[0]
    with pytest.raises(DataError, match="5 rows can't be divided into 2"):
        chunk.get()
    with pytest.raises(ValueError, match="chunks is 0"):
        future_of(1)[0].chunk(0)
