"""Who samples what: groups stay together, and no worker is idle while requests wait at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import ActorRolloutRefConfig, PolicyModelConfig, RolloutConfig
from paceline.protocol import DataProto, DataProtoFuture
from paceline.trainer.ppo.request_pool import RequestPool
from paceline.workers.engine_workers import ActorRolloutRefWorker
from paceline.workers.role_worker import RunContext, built
from tests.tiny import make_tiny_model

PLACES = 2
RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=3, max_response_length=4)
HOW = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}


class Workers:
    """Two real workers, called rank by rank as their group calls them."""

    world_size = 2

    def __init__(self, folder: Path) -> None:
        config = ActorRolloutRefConfig(
            model=PolicyModelConfig(path=str(make_tiny_model(folder / "model"))),
            rollout=RolloutConfig(max_num_seqs=PLACES, load_format="auto"),
        )
        self.ranks = [ActorRolloutRefWorker(config, "rollout", RUN) for _ in range(self.world_size)]
        for rank in self.ranks:
            rank.init_model()

    def __getattr__(self, name: str) -> Any:
        def call(arguments: list[Any]) -> DataProtoFuture:
            pairs = zip(self.ranks, arguments, strict=True)
            return DataProtoFuture.of([getattr(rank, name)(argument) for rank, argument in pairs])

        return call

    def under_way(self) -> list[list[str]]:
        return [sorted(built(rank.rollout)._under_way) for rank in self.ranks]

    def run_out(self, rank: int) -> None:
        rollout = built(self.ranks[rank].rollout)
        while rollout.has_work:
            rollout.step()


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


def group(name: str, size: int = 2) -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 5, 6]] * size),
            "attention_mask": torch.tensor([[0, 1, 1]] * size),
            "seeds": torch.arange(size),
        },
        {"request_id": np.array([f"{name}{sample}" for sample in range(size)], dtype=object)},
        {"sampling": HOW},
    )


def names(rows: list[DataProto]) -> set[str]:
    return {row.non_tensor_batch["request_id"][0] for row in rows}


def test_the_worker_with_the_fewest_requests_takes_the_next_group_as_a_whole(workers: Workers) -> None:
    pool = RequestPool(workers, is_beside=False, places=PLACES, is_fixed=False)  # type: ignore[arg-type]
    pool.submit([group("a", 3), group("b"), group("c")])
    assert workers.under_way() == [["a0", "a1", "a2"], ["b0", "b1", "c0", "c1"]]
    pool.submit([group("d")])
    assert workers.under_way()[0] == ["a0", "a1", "a2", "d0", "d1"]


def test_a_worker_without_work_takes_over_a_group_that_waits_at_another(workers: Workers) -> None:
    pool = RequestPool(workers, is_beside=False, places=PLACES, is_fixed=False)  # type: ignore[arg-type]
    pool.submit([group(name) for name in "abcdef"])
    assert workers.under_way() == [["a0", "a1", "c0", "c1", "e0", "e1"], ["b0", "b1", "d0", "d1", "f0", "f1"]]
    built(workers.ranks[1].rollout).step()
    workers.run_out(0)
    assert names(pool.poll(0)) == {"a0", "a1", "c0", "c1", "e0", "e1"}
    first, second = workers.under_way()
    assert len(first) == PLACES
    assert first[0][0] == first[1][0], "a group as a whole"
    assert not set(first) & set(second)
    assert sorted(first + second) == ["b0", "b1", "d0", "d1", "f0", "f1"]
    begun = {str(request) for request in second} - set(built(workers.ranks[1].rollout).not_begun)
    assert len(begun) == PLACES, "what was begun stays where it is"
    rows: list[DataProto] = []
    while any(workers.under_way()):
        rows += pool.collect(6)
    assert names(rows) == {"b0", "b1", "d0", "d1", "f0", "f1"}


def test_nothing_is_moved_while_all_places_are_taken_or_nothing_waits(workers: Workers) -> None:
    pool = RequestPool(workers, is_beside=False, places=PLACES, is_fixed=False)  # type: ignore[arg-type]
    pool.submit([group(name) for name in "abc"])
    before = workers.under_way()
    for rank in workers.ranks:
        built(rank.rollout).step()
    assert pool.poll(0) == []
    assert workers.under_way() == before


def test_fixed_shares_are_those_of_a_batch(workers: Workers) -> None:
    pool = RequestPool(workers, is_beside=False, places=PLACES, is_fixed=True)  # type: ignore[arg-type]
    pool.submit([group(name) for name in "abc"])
    assert workers.under_way() == [["a0", "a1", "b0"], ["b1", "c0", "c1"]]
    workers.run_out(0)
    assert names(pool.poll(0)) == {"a0", "a1", "b0"}
    assert workers.under_way() == [[], ["b1", "c0", "c1"]]


def test_aborted_requests_are_forgotten(workers: Workers) -> None:
    pool = RequestPool(workers, is_beside=False, places=PLACES, is_fixed=False)  # type: ignore[arg-type]
    pool.submit([group("a"), group("b")])
    pool.abort(["a0", "b1"])
    assert names(pool.collect(4)) | names(pool.collect(4)) == {"a1", "b0"}
    assert pool.collect(4) == []
