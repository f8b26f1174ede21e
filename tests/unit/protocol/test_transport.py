"""A batch pickled as Ray does it: its tensors are buffers of their own, which the receiver maps and does not copy."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from paceline.errors import DataError
from paceline.protocol import DataProto
from tests.batches import make, memory, row_numbers


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
