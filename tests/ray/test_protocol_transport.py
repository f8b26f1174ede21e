"""DataProto through a real Ray object store: nothing is copied on the reader's side, and nobody is warned about it."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from paceline.protocol import DataProto, DataProtoFuture

ROWS, WIDTH = 64, 4096  # more than Ray's limit for values that travel inside a message, 100 KB
SENT_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def make(start: int = 0) -> DataProto:
    numbers = torch.arange(start, start + ROWS)
    columns = {str(dtype): (numbers[:, None] % 2).expand(ROWS, WIDTH).to(dtype) for dtype in SENT_DTYPES}
    return DataProto.from_dict(
        {"row": numbers, **columns},
        {"weight": np.ones((ROWS, WIDTH)), "uid": [f"row{n}" for n in numbers.tolist()], "extra": [{"a": [1]}] * ROWS},
        {"nested": {"tensor": torch.ones(ROWS, WIDTH).bfloat16()}},
    )


def large_tensors(data: DataProto) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in data.batch.items() if name != "row"}
    return {**tensors, "meta": data.meta_info["nested"]["tensor"]}


def mapped_file(address: int) -> str:
    """The file that this process has mapped at an address; empty for its own memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, _, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return path[0] if path else ""
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # "local": never join a cluster that somebody else runs on this machine
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    yield
    ray.shutdown()


def without_last_two(values: list[DataProto]) -> DataProto:
    return DataProto.concat(values)[:-2]


@ray.remote
class Reader:
    def read(self, refs: list[ray.ObjectRef]) -> dict[str, str]:
        """The files in which the tensors of a batch lie; any warning on the way is an error."""
        torch.set_warn_always(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = ray.get(refs[0])
            return {name: mapped_file(tensor.data_ptr()) for name, tensor in large_tensors(data).items()}

    def echo(self, data: DataProto) -> DataProto:
        return data

    def resolve(self, resolver, *values: DataProto) -> list[int]:
        return resolver(list(values)).batch["row"].tolist()


@pytest.fixture(scope="module")
def reader():
    return Reader.remote()


def test_a_worker_reads_every_tensor_in_shared_memory_without_a_warning(reader):
    files = ray.get(reader.read.remote([ray.put(make())]))
    assert set(files) == {*map(str, SENT_DTYPES), "meta"}
    assert all(file.startswith("/dev/shm/") for file in files.values()), files


def test_two_reads_share_one_memory_and_their_arrays_are_read_only():
    ref = ray.put(make())
    first, second = ray.get(ref), ray.get(ref)
    for name, tensor in large_tensors(first).items():
        assert tensor.data_ptr() == large_tensors(second)[name].data_ptr(), name
    weights = [data.non_tensor_batch["weight"] for data in (first, second)]
    assert weights[0].ctypes.data == weights[1].ctypes.data
    assert not weights[0].flags.writeable


def test_a_clone_leaves_shared_memory_and_can_be_written():
    ref = ray.put(make())
    mine = ray.get(ref).clone()
    for tensor in large_tensors(mine).values():
        assert not mapped_file(tensor.data_ptr()).startswith("/dev/shm/")
        tensor.zero_()
    mine.non_tensor_batch["weight"][:] = 0
    for tensor in large_tensors(ray.get(ref)).values():
        assert tensor[1].all()


def test_a_round_trip_through_an_actor_changes_nothing(reader):
    sent = make()
    received = ray.get(reader.echo.remote(ray.put(sent)))
    received.union(sent)  # an error for any difference
    assert list(received.batch.keys()) == list(sent.batch.keys())
    for tensor in large_tensors(received).values():
        assert mapped_file(tensor.data_ptr()).startswith("/dev/shm/")


def test_a_column_keeps_its_memory_when_the_batch_and_the_reference_are_gone():
    ref = ray.put(make())
    column = ray.get(ref).batch["torch.bfloat16"][3]
    del ref
    gc.collect()
    for _ in range(6):  # more than the store holds at once, so freed memory is used again
        ray.put(np.full(50 * 2**20, 255, dtype=np.uint8))
    assert torch.equal(column, torch.ones(WIDTH).bfloat16())


def test_shards_are_sent_by_their_own_size():
    whole = make()
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(whole.chunk(4)[1].select(meta_info_keys=[]), protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == whole.nbytes // 4


def test_a_worker_resolves_its_chunk_of_a_future_from_the_parts(reader):
    parts = [ray.put(make(0)), ray.put(make(ROWS))]
    future = DataProtoFuture(parts, without_last_two, ray.get)
    assert future.get().batch["row"].tolist() == list(range(2 * ROWS - 2))
    second = future.chunk(2)[1]
    assert ray.get(reader.resolve.remote(second.resolver, *second.parts)) == list(range(ROWS - 1, 2 * ROWS - 2))
