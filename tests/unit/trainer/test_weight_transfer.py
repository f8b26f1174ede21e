"""What the driver asks of both sides when it brings weights to a rollout on other devices, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.protocol import DataProtoFuture
from paceline.trainer.ppo.weight_transfer import BroadcastTransfer, ObjectStoreTransfer, make_weight_transfer
from paceline.workers.weight_calls import WantedWeights

WANTED = WantedWeights("bfloat16", adapter=False)
ANSWERS = {"wanted_weights": [WANTED], "count_weight_buckets": [3], "open_weight_channel": "a place"}


class Recording:
    """A group that takes note of its calls, beside those of another, and answers at once."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], world_size: int) -> None:
        self.name, self.calls, self.world_size = name, calls, world_size

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> DataProtoFuture:
            self.calls.append((self.name, method, *args, *kwargs.items()))
            return DataProtoFuture.of(ANSWERS.get(method, f"{method} of {self.name}"))

        return call


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def groups(calls: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    return Recording("actor", calls, 4), Recording("rollout", calls, 2)


def test_a_broadcast_begins_when_both_sides_are_ready_and_not_before(
    groups: tuple[Any, Any], calls: list[tuple[Any, ...]]
) -> None:
    transfer = make_weight_transfer("broadcast", *groups)
    assert isinstance(transfer, BroadcastTransfer)
    assert calls[-2:] == [
        ("rollout", "join_weight_channel", "a place", 2, ("sends", False)),
        ("actor", "join_weight_channel", "a place", 2, ("sends", True)),
    ]
    calls.clear()
    transfer.send(7)
    assert [call[:2] for call in calls] == [
        ("actor", "ready_for_weights"),
        ("rollout", "ready_for_weights"),
        ("actor", "broadcast_weights"),
        ("rollout", "receive_broadcast"),
    ]
    for call, other, told in ((calls[2], "rollout", WANTED), (calls[3], "actor", 7)):
        assert (call[2].get(), call[3]) == (f"ready_for_weights of {other}", told)


def test_through_the_object_store_go_as_many_buckets_as_were_counted(
    groups: tuple[Any, Any], calls: list[tuple[Any, ...]]
) -> None:
    transfer = make_weight_transfer("object_store", *groups)
    assert isinstance(transfer, ObjectStoreTransfer)
    assert calls == [("rollout", "wanted_weights"), ("actor", "count_weight_buckets", WANTED)]
    calls.clear()
    transfer.send(2)
    assert calls[:3] == [("actor", "send_weights", bucket, WANTED) for bucket in range(3)]
    assert calls[3][:2] == ("rollout", "receive_weights")
    assert len(calls[3][2:]) == 4
    assert calls[3][-1] == ("version", 2)


def test_weights_that_are_shared_are_not_sent(groups: tuple[Any, Any]) -> None:
    assert make_weight_transfer("object_store", groups[0], None) is None
