"""What is a column, a choice of rows, and the same content; how batches are joined."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from paceline.errors import DataError
from paceline.protocol import DataProto
from tests.batches import make, row_numbers


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


def test_union_refuses_conflicts_of_meta_info_also_deep_inside():
    with pytest.raises(DataError, match=r"meta info key 'cfg' .*\{'a': \[1\]\} and \{'a': \[2\]\}"):
        make(1, cfg={"a": [1]}).union(make(1, cfg={"a": [2]}))
