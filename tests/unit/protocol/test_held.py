"""Columns that lie elsewhere: what is done to a batch moves row numbers alone, and reading gives what was there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from paceline.errors import DataError
from paceline.protocol import DataProto, pad_dataproto_to_divisor
from paceline.protocol.held import HeldColumn, StoredRows
from paceline.protocol.leaving import left_behind, packed


class Shelf(StoredRows):
    """Rows on a shelf of this process, which knows when they are fetched."""

    tensors: ClassVar[dict[int, torch.Tensor]] = {}
    fetched: ClassVar[list[int]] = []
    asked: ClassVar[list[int]] = []

    def __init__(self, number: int, rows: int) -> None:
        self.number, self.rows = number, rows

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self):
        return Shelf, (self.number, self.rows)

    @classmethod
    def fetch(cls, wanted: Sequence[tuple[Shelf, np.ndarray]]) -> list[torch.Tensor]:
        cls.fetched += [one.number for one, _ in wanted]
        cls.asked += [row for _, rows in wanted for row in rows.tolist()]
        return [cls.tensors[one.number][torch.from_numpy(rows)] for one, rows in wanted]


@pytest.fixture(autouse=True)
def empty_shelf() -> None:
    Shelf.tensors.clear()
    Shelf.fetched.clear()
    Shelf.asked.clear()


def keep(tensors: list[torch.Tensor]) -> list[Shelf]:
    first = len(Shelf.tensors)
    Shelf.tensors.update({first + place: tensor for place, tensor in enumerate(tensors)})
    return [Shelf(first + place, len(tensor)) for place, tensor in enumerate(tensors)]


def make(rows: int, start: int = 0, pieces: int = 2) -> tuple[DataProto, DataProto]:
    """A batch, and the same with its column `x` in pieces on the shelf and `mask` as stretches."""
    numbers = torch.arange(start, start + rows)
    x = numbers[:, None] * 100.0 + torch.randn(rows, 10, generator=torch.Generator().manual_seed(start))
    mask = (torch.arange(64) < (numbers % 60)[:, None]).long()
    plain = DataProto.from_dict({"x": x, "mask": mask, "row": numbers}, {"uid": [f"u{n}" for n in numbers.tolist()]})
    stays = HeldColumn(keep(list(x.chunk(pieces))), x.dtype, (10,), is_finite=True)
    held = plain.with_columns(lambda column: stays if column is x else column)
    return plain, left_behind(held, keep, 10**9)


def assert_same(held: DataProto, plain: DataProto) -> None:
    assert list(held.batch.keys()) == list(plain.batch.keys())
    assert len(held) == len(plain)
    for name in plain.batch.keys():  # noqa: SIM118 (a TensorDict)
        assert held.row_shape(name) == tuple(plain.batch[name].shape[1:])
        assert torch.equal(held.batch[name], plain.batch[name]), name
        assert held.batch[name].dtype == plain.batch[name].dtype
    assert held.non_tensor_batch["uid"].tolist() == plain.non_tensor_batch["uid"].tolist()


OPERATIONS: dict[str, Callable[[DataProto], DataProto]] = {
    "slice": lambda data: data[2:7],
    "step": lambda data: data[::3],
    "backwards": lambda data: data[::-1],
    "rows": lambda data: data[[5, 0, 0, 11, -1]],
    "mask": lambda data: data[np.arange(12) % 2 == 0],
    "no rows": lambda data: data[[]],
    "repeat": lambda data: data.repeat(3, interleave=True),
    "chunk": lambda data: data.chunk(3)[1],
    "parts in another order": lambda data: DataProto.concat(data.chunk(4)[::-1]),
    "select": lambda data: data.select(["x"], ["uid"]),
    "reorder": lambda data: data.select().reorder(np.random.default_rng(0).permutation(12)),
    "union": lambda data: data.select(["row"], ["uid"]).union(data.select(["x", "mask"], [])),
    "union of equals": lambda data: data.select().union(data[:]),
    "rename": lambda data: data.select().rename(["x", "mask"], ["mask", "x"]),
    "pad": lambda data: pad_dataproto_to_divisor(data, 5)[0],
    "clone": lambda data: data.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "again and again": lambda data: DataProto.concat([data[6:].select(), data[[3, 1]]])[[7, 2, 0]].repeat(2),
    "beside a plain one": lambda data: DataProto.concat([data, data.clone()])[5:20],
    "pickled": lambda data: pickle.loads(pickle.dumps(data, 5)),
    "rows of it, pickled twice": lambda data: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(data[3:9]))[[4, 1]])),
    "packed": lambda data: pickle.loads(pickle.dumps(packed(data.repeat(4)), 5)),
    "to_tensordict": lambda data: DataProto.from_tensordict(data.to_tensordict()),
    "to": lambda data: data.select().to("cpu"),
    "fetched": lambda data: data.fetched(),
}


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read before"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_a_batch_that_is_here(name, is_read):
    plain, held = make(12)
    if is_read:
        assert_same(held, plain)
    assert_same(OPERATIONS[name](held), OPERATIONS[name](plain))


def test_choosing_ordering_joining_and_sending_fetches_nothing():
    _, held = make(12)
    other = make(12, start=12)[1]
    joined = DataProto.concat([held, other])[[20, 3, 4, 19]].select()
    sent = pickle.loads(pickle.dumps(joined.union(DataProto.from_dict({"new": torch.zeros(4)})), 5))
    assert "x" in sent.batch
    assert sent.is_known_finite("x")
    assert not sent.is_known_finite("new")
    assert sent.row_shape("x") == (10,)
    assert f"{sent}".startswith("DataProto(4 rows")
    assert Shelf.fetched == []


def test_only_the_pieces_that_have_the_rows_are_asked_for_these_rows_and_once():
    _, held = make(12, pieces=4)
    part = held[7:9]
    assert part.batch["x"] is part.batch["x"]
    assert Shelf.fetched == [2]
    assert Shelf.asked == [1, 2]


def test_who_keeps_a_few_rows_keeps_no_other_piece():
    plain, held = make(12, pieces=6)
    few = held[[11, 0, 11]]
    assert {piece.number for piece in few._columns()["x"].sources} == {0, 5}
    assert_same(few[[2, 1]], plain[[11, 0]])
    assert_same(DataProto.concat([few, held[4:5]]), plain[[11, 0, 11, 4]])


def test_what_is_sent_names_no_piece_that_it_has_no_row_of():
    _, held = make(12, pieces=4)
    sent = pickle.loads(pickle.dumps(held[[11, 0]]))
    assert {piece.number for piece in sent._columns()["x"].sources} == {0, 3}


@pytest.mark.parametrize(
    "read",
    [
        lambda batch: batch["x"],
        lambda batch: batch.get("x"),
        lambda batch: batch.get("x", None),
        lambda batch: dict(batch.items())["x"],
        lambda batch: dict(batch)["x"],
        lambda batch: next(iter(batch.values())),
        lambda batch: batch.select("x")["x"],
        lambda batch: batch.clone()["x"],
        lambda batch: batch[:]["x"],
        lambda batch: batch.to_dict()["x"],
        lambda batch: batch.pop("x"),
        lambda batch: batch.to(torch.float32)["x"],
        lambda batch: torch.cat([batch, batch])["x"][:12],
        lambda batch: batch.apply(lambda tensor: tensor)["x"],
        lambda batch: pickle.loads(pickle.dumps(batch))["x"],
        lambda batch: copy.deepcopy(batch)["x"],
    ],
)
def test_reading_the_tensordict_in_any_way_gives_tensors(read):
    plain, held = make(12)
    assert isinstance(held.batch, TensorDict)
    assert torch.equal(read(held.batch), plain.batch["x"])


def test_a_column_that_is_set_takes_the_place_of_one_that_lies_elsewhere():
    _, held = make(12)
    held.batch["x"] = torch.ones(12, 10)
    assert torch.equal(pickle.loads(pickle.dumps(held[:3])).batch["x"], torch.ones(3, 10))


def test_a_column_that_was_changed_in_place_is_what_it_is_here():
    plain, held = make(12)
    held.batch["x"].mul_(0)
    for one in (held[3:5], held[[3, 4]], DataProto.concat([held, held])[3:5], pickle.loads(pickle.dumps(held))[3:5]):
        assert torch.equal(one.batch["x"], torch.zeros(2, 10))
    assert not held.is_known_finite("x")
    with pytest.raises(DataError, match="tensor column 'x' is on both sides with different content"):
        held.union(plain)


def test_columns_that_differ_are_refused_as_ever():
    _, held = make(12)
    other = make(12, start=5)[1]
    with pytest.raises(DataError, match="tensor column 'x' is on both sides with different content"):
        held.select(["x"], []).union(other.select(["x"], []))
    with pytest.raises(DataError, match="concat of column 'x': part 0 has"):
        DataProto.concat([held.select(["x"], []), DataProto.from_dict({"x": torch.zeros(2, 10, dtype=torch.int64)})])


def test_an_answer_leaves_its_large_columns_and_takes_the_small_ones_along():
    answer = DataProto.from_dict(
        {"large": torch.randn(40, 2000), "small": torch.randn(40, 30), "mask": torch.ones(40, 2000).bool()}
    )
    answer.batch["broken"] = torch.full((40, 2000), float("nan")) * torch.randn(40, 2000)
    left = left_behind(answer, keep, 32_000)
    columns = left._columns()
    assert [len(piece) for piece in columns["large"].sources] == [12, 12, 12, 4]  # twelve rows are 96 KB
    assert isinstance(columns["small"], torch.Tensor)
    assert columns["mask"].nbytes == 80_000
    assert len(pickle.dumps(left.select(["mask"]))) < 3000
    assert left.is_known_finite("large")
    assert not left.is_known_finite("broken")
    assert torch.equal(left.batch["large"], answer.batch["large"])
    assert Shelf.fetched == [0, 1, 2, 3]


def test_columns_without_a_number_or_of_any_shape_and_dtype_can_stay():
    columns = {
        "none": torch.zeros(6, 0),
        "one": torch.arange(6.0).half(),
        "deep": torch.randn(6, 4, 50),
        "eight bits": torch.randn(6, 90).to(torch.float8_e4m3fn),
        "complex": torch.randn(6, 90, dtype=torch.complex64),
        "apart": torch.randn(90, 6).T,
        "learns": torch.randn(6, 90, requires_grad=True),
    }
    left = left_behind(DataProto.from_dict(columns), keep, 0)
    for name, column in columns.items():
        raw, came = (one.detach().flatten().view(torch.uint8) for one in (column, left.batch[name]))
        assert torch.equal(raw, came), name
    assert {n for n, column in left._columns().items() if isinstance(column, torch.Tensor)} == {"none"}
    assert not left.is_known_finite("eight bits")
    empty = left_behind(DataProto.from_dict({"x": torch.zeros(0, 5)}), keep, 0)
    assert len(empty) == 0


def test_what_the_driver_sends_is_packed_where_that_is_smaller():
    prompts = torch.randint(0, 30_000, (5, 200)).repeat_interleave(8, dim=0)
    data = DataProto.from_dict({"prompts": prompts, "mask": torch.ones_like(prompts), "noise": torch.randn(40, 200)})
    size = len(pickle.dumps(packed(data.select(["prompts", "mask"])), 5))
    assert size < 1.3 * prompts[::8].nbytes
    assert packed(data)._columns()["noise"] is data.batch["noise"]
