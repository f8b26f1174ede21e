"""What people who come from verl use of `DataProto`, subclasses, and pickles of earlier versions."""

from __future__ import annotations

import base64
import copy
import pickle
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from paceline.errors import DataError
from paceline.protocol import DataProto, DataProtoConfig, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

PICKLED_WHEN_PROTOCOL_WAS_ONE_MODULE = (
    "c-n=LOKZYF6oqG^)`}LCmUi1^R)JcPE($K(HDICp67rZZftU&7L@Ko4My)VAZ~Z;}XYEW9@j;<?k(<opoO`~^YhQtZ@{*m@^+_Bh#7a36%x5vkhQ"
    "o<ZqA3Yr1Lg;q61zZ=Y&n7?6UH4jC0uRE%Oo48Gt2QACzg6AJn}&{oshG!mxW<|%G}--UI>@H^hTAkSIZ8vmJ6yLh*?Usg%Lf#`f~*@VA>UlA7L~a"
    "J^iT4A2t%;*@kT_LE<3@bxhU-<33eAN<_b>G?sc5Q=n(GVQzP3Xz)D%dZ7%udjs0}OMU_LN=wrldG3WVbH!c1)Xi)|^QmM}0P^|}$2f~c<Z|w+I4u"
    "p7B@@9jU#Oe3DeFm4Y;M3t3m9S#iWzY3r{;P-3jTf)e4r*<zv^G}rozpDsBeiA&=K3{xOUuuw)bH&J$H2?ND5kCoZ><A0#Dfc2M<2LQ_tz#cXxF3v"
    "h@plGvJ&"
)


def make(rows: int, **meta: object) -> DataProto:
    names = [f"row {row}" for row in range(rows)]
    return DataProto.from_dict({"ids": torch.arange(rows)}, {"name": names}, meta)


class Mine(DataProto):
    """A subclass as users write it: with methods of its own."""

    def total(self) -> int:
        return int(self.batch["ids"].sum())


@dataclass(eq=False, repr=False)
class Labelled(DataProto):
    label: str = ""


def test_metrics_of_concatenated_batches_are_a_dict_of_lists():
    parts = [make(1, metrics={"loss": 1.0, "lr": 0.1}), make(1, metrics={"loss": 2.0}), make(1)]
    joined = DataProto.concat(parts)
    assert joined.meta_info["metrics"] == {"loss": [1.0, 2.0], "lr": [0.1]}
    again = DataProto.concat([joined, make(1, metrics={"loss": [3.0, 4.0]})])
    assert again.meta_info["metrics"] == {"loss": [1.0, 2.0, 3.0, 4.0], "lr": [0.1]}
    assert joined.meta_info["metrics"]["loss"] == [1.0, 2.0], "what was gathered first has changed"
    assert parts[0].meta_info["metrics"] == {"loss": 1.0, "lr": 0.1}


def test_metrics_that_are_no_dicts_are_gathered_into_a_list():
    assert DataProto.concat([make(1, metrics=1), make(1, metrics={"a": 2})]).meta_info["metrics"] == [1, {"a": 2}]


def test_no_non_tensors_and_no_meta_info_may_be_none():
    data = DataProto(TensorDict({"a": torch.arange(2)}, batch_size=[2]), non_tensor_batch=None, meta_info=None)
    assert (data.non_tensor_batch, data.meta_info) == ({}, {})
    assert len(data.union(make(2))) == 2


def test_a_tensordict_with_non_tensors_becomes_columns_and_meta_info():
    tensors = TensorDict(
        {
            "ids": torch.arange(2),
            "uid": NonTensorStack("a", "b"),
            "turns": NonTensorStack(NonTensorData([1, 2]), NonTensorData([3, 4])),
            "temperature": NonTensorData(0.7, batch_size=[2]),
        },
        batch_size=[2],
    )
    data = DataProto.from_tensordict(tensors, {"step": 1})
    assert data.batch.keys() == {"ids"}
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert data.non_tensor_batch["turns"].tolist() == [[1, 2], [3, 4]]
    assert data.non_tensor_batch["turns"].shape == (2,)
    assert data.meta_info == {"step": 1, "temperature": 0.7}
    assert data[1:].non_tensor_batch["uid"].tolist() == ["b"]


def test_a_batch_survives_the_way_through_a_tensordict():
    meta = {"temperature": 0.7, "stop": ["x", "y"], "nothing": None, "weights": torch.ones(3)}
    data = DataProto.from_dict(
        {"ids": torch.arange(6).view(3, 2)},
        {"text": ["a", "b", "c"], "dicts": [{"k": 1}, {}, {"k": [2]}], "lists": [[1, 2], [3, 4], []]},
        meta,
    )
    there = data.to_tensordict()
    assert there.batch_size == (3,)
    assert there["temperature"] == 0.7
    assert there["ids"].data_ptr() == data.batch["ids"].data_ptr()
    assert there[1:]["text"] == ["b", "c"]
    back = DataProto.from_tensordict(there)
    assert back.non_tensor_batch["dicts"].tolist() == [{"k": 1}, {}, {"k": [2]}]
    data.union(back)  # raises what differs
    assert set(back.meta_info) == set(meta)


@pytest.mark.parametrize("data", [make(0, step=1), DataProto(meta_info={"step": 1}), DataProto(), make(3)[:0]])
def test_empty_batches_survive_the_way_through_a_tensordict(data):
    back = DataProto.from_tensordict(data.to_tensordict())
    assert (len(back), back.meta_info) == (0, data.meta_info)
    assert set(back.non_tensor_batch) == set(data.non_tensor_batch)


def test_a_name_can_be_only_one_thing_in_a_tensordict():
    with pytest.raises(DataError, match=r"columns and meta info: \['name'\]"):
        make(1, name=1).to_tensordict()


@pytest.mark.parametrize("counts", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_each_row_is_repeated_as_often_as_asked(counts):
    repeated = make(3).sample_level_repeat(counts)
    assert repeated.batch["ids"].tolist() == [0, 0, 2]
    assert repeated.non_tensor_batch["name"].tolist() == ["row 0", "row 0", "row 2"]


@pytest.mark.parametrize("counts", [[1, 1], [1, 1, -1], 2, [0.5, 1.0, 2.0]])
def test_counts_that_do_not_fit_the_rows_are_refused(counts):
    with pytest.raises(DataError, match="one count of 0 or more for each of the 3 rows"):
        make(3).sample_level_repeat(counts)


@pytest.mark.parametrize("rows", [[2, 0], np.array([2, 0]), torch.tensor([-1, 0])])
def test_rows_are_selected_by_number(rows):
    assert make(3).select_idxs(rows).batch["ids"].tolist() == [2, 0]


def test_rows_are_selected_by_a_mask():
    assert make(3).select_idxs(torch.tensor([True, False, True])).batch["ids"].tolist() == [0, 2]


def test_select_shares_columns_unless_a_deep_copy_is_asked_for():
    data = make(2, notes=["a"])
    shared, copied = data.select(["ids"]), data.select(["ids"], deepcopy=True)
    shared.batch["ids"] += 1
    copied.batch["ids"] += 10
    copied.meta_info["notes"].append("b")
    assert data.batch["ids"].tolist() == [1, 2]
    assert data.meta_info["notes"] == ["a"]


def test_padding_takes_its_divisor_by_the_name_that_verl_gives_it():
    padded, pad_size = pad_dataproto_to_divisor(make(5), size_divisor=4)
    assert (len(padded), pad_size, len(unpad_dataproto(padded, pad_size=pad_size))) == (8, 3, 5)


def test_chunks_of_a_batch_with_auto_padding_need_not_be_equal():
    data = DataProto.from_dict({"ids": torch.arange(5)}, auto_padding=True)
    assert data.meta_info == {DataProtoConfig.auto_padding_key: True}
    assert [len(chunk) for chunk in data.chunk(4)] == [2, 1, 1, 1]
    assert DataProto.concat(data.chunk(4)).batch["ids"].tolist() == [0, 1, 2, 3, 4]
    assert data[:3].is_padding_enabled()
    single = DataProto.from_single_dict({"ids": torch.arange(3), "name": ["a", "b", "c"]}, auto_padding=True)
    assert [chunk.non_tensor_batch["name"].tolist() for chunk in single.chunk(2)] == [["a", "b"], ["c"]]
    with pytest.raises(DataError, match="can't be divided"):
        make(5).chunk(4)


def made_by(kind: type[DataProto]) -> dict[str, DataProto]:
    data = kind.from_dict({"ids": torch.arange(4)}, {"name": list("abcd")})
    return {
        "from_single_dict": kind.from_single_dict({"ids": torch.arange(4)}),
        "from_tensordict": kind.from_tensordict(TensorDict({"ids": torch.arange(4)}, batch_size=[4])),
        "slice": data[1:],
        "rows": data[[0, 1]],
        "chunk": data.chunk(2)[1],
        "split": data.split(3)[0],
        "concat": kind.concat([data, data]),
        "concat of the base": DataProto.concat([data, data]),
        "concat of one": DataProto.concat([data]),
        "concat of other batches": kind.concat([make(1), make(2)]),
        "select": data.select(["ids"]),
        "pop": kind.from_dict({"ids": torch.arange(4), "b": torch.ones(4)}).pop(["b"]),
        "union": data[:].union(DataProto.from_dict({"b": torch.ones(4)})),
        "repeat": data.repeat(2),
        "sample_level_repeat": data.sample_level_repeat([1, 2, 0, 0]),
        "reorder": data[:].reorder([3, 2, 1, 0]),
        "rename": data[:].rename("ids", "numbers"),
        "to": data[:].to("cpu"),
        "clone": data.clone(),
        "copy": copy.copy(data),
        "pickle": pickle.loads(pickle.dumps(data)),
        "make_iterator": next(data.make_iterator(2, 1)),
        "pad": pad_dataproto_to_divisor(data, 3)[0],
        "unpad": unpad_dataproto(data, 1),
        "future": DataProtoFuture([data, data], DataProto.concat, lambda parts: parts).get(),
    }


def test_whatever_is_made_from_a_subclass_is_of_it():
    assert {name: type(data) for name, data in made_by(Mine).items()} == dict.fromkeys(made_by(Mine), Mine)
    assert Mine.from_dict({"ids": torch.arange(4)})[2:].total() == 5


def test_a_subclass_comes_back_from_disk(tmp_path):
    Mine.from_dict({"ids": torch.arange(4)}).save_to_disk(tmp_path / "batch")
    assert type(Mine.load_from_disk(tmp_path / "batch")) is Mine


def test_batches_of_different_classes_give_the_class_that_joins_them():
    data = Mine.from_dict({"ids": torch.arange(4)})
    assert type(DataProto.concat([data, DataProto.from_dict({"ids": torch.arange(4)})])) is DataProto
    assert repr(data).startswith("Mine(4 rows")


def test_fields_that_a_subclass_adds_go_along():
    data = Labelled(make(4).batch, {}, {}, label="train")
    kept = [data[1:], data.chunk(2)[0], DataProto.concat([data, data]), data.select(), data.clone(), data.repeat(2)]
    kept.append(pickle.loads(pickle.dumps(data)))
    assert [one.label for one in kept] == ["train"] * len(kept)


def test_a_pickle_from_before_the_module_was_divided_still_loads():
    data = pickle.loads(zlib.decompress(base64.b85decode(PICKLED_WHEN_PROTOCOL_WAS_ONE_MODULE)))
    assert data.batch["a"].tolist() == [[1, 2], [3, 4]]
    assert data.batch["h"].tolist() == [0.5, 1.5]
    assert data.batch["h"].dtype == torch.bfloat16
    assert data.non_tensor_batch["uid"].tolist() == ["x", "y"]
    assert data.meta_info["step"] == 3
