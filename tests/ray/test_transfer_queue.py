"""Columns that stay in TransferQueue: the same numbers as without, its life, and who shares it. `make
test-transfer-queue` has the package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from paceline.errors import ResourceError, WorkerError
from paceline.protocol import DataProto
from paceline.protocol.held import HeldColumn
from paceline.single_controller.base import Dispatch, Worker, call_tag, register
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from paceline.single_controller.ray.queue_store import CONTROLLER, PACKAGE, QueueSession, QueueStore
from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.runs import as_omegaconf, base_config, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="TransferQueue is not installed"),
]

QUEUE = {"transfer_queue__enable": True, "trainer__columns_stay_bytes": 0}
SPLIT = {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2}


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    # Two devices beside the queue's controller and two storage units.
    environment = {"env_vars": {"PACELINE_CHECK_INPUTS": "1"}}
    ray.init("local", num_cpus=5, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def has_queue() -> bool:
    try:
        ray.get_actor(CONTROLLER, namespace=PACKAGE)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("placement", [{}, SPLIT], ids=["colocated", "split"])
def test_a_run_with_the_queue_gives_the_numbers_of_one_without(material: Path, tmp_path: Path, placement) -> None:
    changes: dict[str, Any] = {"trainer__total_training_steps": 3, "trainer__test_freq": 2}
    train_in_process(base_config(material, tmp_path / "without", **changes))
    run_ppo(as_omegaconf(base_config(material, tmp_path / "with", **changes, **placement, **QUEUE)))
    assert results(tmp_path / "with") == results(tmp_path / "without")
    assert not has_queue()


class Maker(Worker):
    leaves_inputs_alone = True

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto) -> DataProto:
        rows = data.batch["row"]
        numbers = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(int(rows[0])))
        return DataProto.from_dict(
            {
                "float": numbers,
                "half": numbers.bfloat16(),
                "whole": (numbers * 1000).long(),
                "bool": numbers > 0,
                "deep": numbers.view(-1, 30, 10),
                "one": numbers[:, 0].clone(),
            }
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, data: DataProto) -> DataProto:
        assert not any(isinstance(column, HeldColumn) for column in data._columns().values())
        return data


@pytest.fixture(scope="module")
def group() -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([2], use_gpu=False, name_prefix="queue_pool")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Maker), "makers")
    yield group
    group.shutdown()


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(count)})


def test_columns_of_every_kind_come_back_and_steps_that_are_over_are_cleared(group, monkeypatch) -> None:
    group.column_store = None
    plain = group.make(rows(9))
    store = QueueStore("mine", min_bytes=0)
    session = QueueSession(store, 2)
    group.column_store = store
    token = call_tag.set({"step": 4})
    made = group.make(rows(9))
    assert {name for name, column in made._columns().items() if isinstance(column, HeldColumn)} == set(
        plain.batch.keys()
    )
    order = torch.tensor([8, 0, 3, 3, 7])
    passed = group.same(made[order])
    for name, column in plain.batch.items():
        assert torch.equal(made.batch[name], column), name
        assert torch.equal(passed.batch[name], column[order]), name
    call_tag.reset(token)

    asked: list[str] = []
    real = importlib.import_module(PACKAGE).kv_batch_get
    with monkeypatch.context() as patch:
        patch.setattr(f"{PACKAGE}.kv_batch_get", lambda keys, **more: asked.extend(keys) or real(keys=keys, **more))
        few = group.make(rows(9))[torch.tensor([8, 2, 8])]
        assert torch.equal(few.batch["deep"], plain.batch["deep"][[8, 2, 8]])
    assert len(asked) == 2  # no rows but these

    unread = group.make(rows(9))  # of step 0
    store.step_closed(1)
    assert torch.equal(unread[:2].batch["float"], plain.batch["float"][:2])
    store.step_closed(2)
    with pytest.raises(WorkerError, match="makers rank 1 failed in make: columns of its answer"):
        unread[5:].batch["float"].sum()
    session.close()
    assert not has_queue()


def test_a_queue_that_is_there_is_joined_and_left(group) -> None:
    first = QueueSession(QueueStore("first", min_bytes=0), 1)
    second = QueueSession(QueueStore("second", min_bytes=0), 1)
    group.column_store = first.store
    of_first = group.make(rows(4))
    group.column_store = second.store
    of_second = group.make(rows(4))
    second.close()
    assert has_queue()
    with pytest.raises(WorkerError, match="TransferQueue has no such rows"):
        of_second.batch["float"].sum()
    assert of_first.batch["float"].shape == (4, 300)
    first.close()
    assert not has_queue()


def test_too_few_cpus_are_told_before_it_would_wait_for_ever() -> None:
    with pytest.raises(ResourceError, match=r"wants 101 CPUs.* of the 5 that Ray has are free"):
        QueueSession(QueueStore("large"), 100)
