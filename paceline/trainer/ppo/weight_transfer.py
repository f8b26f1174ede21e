"""How new weights come from the actor to a rollout on other devices: the driver's side of `workers.weight_calls`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from paceline.protocol import DataProtoFuture
from paceline.single_controller.ray import RayWorkerGroup, joint_calls

if TYPE_CHECKING:
    from paceline.workers.weight_calls import WantedWeights


class WeightTransfer(ABC):
    """Brings weights from one group to another. Both are called at the same moment, so all transfers are in one order
    on either side."""

    def __init__(self, actor: RayWorkerGroup, rollout: RayWorkerGroup) -> None:
        self.actor, self.rollout = actor, rollout
        self.wanted: WantedWeights = rollout.wanted_weights().get()[0]

    @abstractmethod
    def send(self, version: int) -> DataProtoFuture:
        """Issue the calls for the policy as it will be after the calls before; ends when the rollout has it."""


class ObjectStoreTransfer(WeightTransfer):
    """Through Ray's object store: the actor does not wait for the rollout, and the store holds all weights."""

    def __init__(self, actor: RayWorkerGroup, rollout: RayWorkerGroup) -> None:
        super().__init__(actor, rollout)
        self.num_buckets: int = actor.count_weight_buckets(self.wanted).get()[0]

    def send(self, version: int) -> DataProtoFuture:
        buckets = [self.actor.send_weights(bucket, self.wanted) for bucket in range(self.num_buckets)]
        received: DataProtoFuture = self.rollout.receive_weights(*buckets, version=version)
        return received


class BroadcastTransfer(WeightTransfer):
    """By broadcast from the actor's first rank to all of the rollout's. They meet in the transfer: each waits for the
    other, and neither holds more than two buckets."""

    def __init__(self, actor: RayWorkerGroup, rollout: RayWorkerGroup) -> None:
        super().__init__(actor, rollout)
        point = actor.open_weight_channel().get()
        with joint_calls():
            joining = [
                group.join_weight_channel(point, rollout.world_size, sends=group is actor) for group in (rollout, actor)
            ]
        for future in joining:
            future.get()

    def send(self, version: int) -> DataProtoFuture:
        with joint_calls():
            self.actor.broadcast_weights(self.wanted)
            received: DataProtoFuture = self.rollout.receive_broadcast(version)
        return received


def make_weight_transfer(
    by: Literal["object_store", "broadcast"], actor: RayWorkerGroup, rollout: RayWorkerGroup | None
) -> WeightTransfer | None:
    """None where the rollout has the actor's own devices."""
    if rollout is None:
        return None
    return (BroadcastTransfer if by == "broadcast" else ObjectStoreTransfer)(actor, rollout)
