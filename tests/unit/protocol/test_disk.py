"""A batch on disk: all of it comes back, a failed save harms nothing, and a file of somebody else runs no code."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import DataError
from paceline.protocol import DataProto, disk
from tests.batches import make, row_numbers


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
