"""How the policy's weights come to a rollout in other processes: through Ray's object store, or by broadcast.

Weights travel in the numbers in which the rollout holds them, and are the same bit for bit either way. Of a policy with
LoRA, all weights come with the adapter merged or, to an engine that takes it, the adapter alone. Version and digests
come along, so that what arrives is compared with what was sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from paceline.engine import Engine
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from paceline.protocol.digest import tensor_digest
from paceline.single_controller.base import Dispatch
from paceline.workers.request_calls import RequestCalls
from paceline.workers.role_worker import RunContext, built, role_method
from paceline.workers.weight_channel import MeetingPoint, WeightChannel, this_process
from paceline.workers.weight_sync import WeightSync, arrival_problem

BUCKET_BYTES = 256 * 2**20
"""Large enough that calls cost nothing beside it, small enough that a rank never holds much of the model twice."""


@dataclass(frozen=True)
class WantedWeights:
    """What a rollout is to be sent."""

    dtype: str
    """The name of the numbers that it holds its weights in, such as bfloat16."""
    adapter: bool
    """LoRA's A and B alone: it has the base weights."""
    twice: bool = False
    """It may ask for them again, after it has compared (on_weight_mismatch=resend)."""


class WeightCalls(RequestCalls):
    """The part of a worker that sends the policy, or takes it for its rollout."""

    leaves_inputs_alone = True

    def __init__(self, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.actor: Engine | None = None
        self.version = 0
        """Of the policy: the number of steps whose update of the actor it contains."""
        self.weight_sync: WeightSync | None = None
        self.outgoing: Iterator[DataProto] = iter(())
        self.store: dist.Store | None = None
        self.channel: WeightChannel | None = None

    @role_method(Dispatch.ONE_TO_ALL)
    def wanted_weights(self) -> WantedWeights:
        """What the rollout is to be sent."""
        rollout, dtype = built(self.rollout), str(built(self.rollout).weights_dtype)
        twice = len(built(self.weight_sync).tries) > 1
        return WantedWeights(dtype.removeprefix("torch."), rollout.takes_adapter, twice)

    @role_method(Dispatch.ONE_TO_ALL)
    def count_weight_buckets(self, wanted: WantedWeights) -> int:
        """Into how many parts `send_weights` divides the policy. Nothing is gathered for it, if the engine can tell."""
        shapes = built(self.actor).weight_shapes(adapter=wanted.adapter)
        return sum(1 for _ in in_buckets(in_numbers(shapes, wanted.dtype)))

    def named_policy(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy as it is now: all weights, or LoRA's adapter alone. Collective."""
        actor = built(self.actor)
        return actor.named_adapter() if adapter else actor.named_full_weights()

    # Through the object store.

    @role_method(Dispatch.ONE_TO_ALL_FIRST_ANSWERS)
    def send_weights(self, bucket: int, wanted: WantedWeights) -> DataProto:
        """One part of the policy's whole weights. Parts are asked for in order."""
        if bucket == 0:
            weights = in_numbers(self.named_policy(adapter=wanted.adapter), wanted.dtype)
            self.outgoing = sealed(weights, self.version)
        return next(self.outgoing)

    @role_method(Dispatch.ONE_TO_ALL)
    def receive_weights(self, *buckets: DataProto, version: int | None = None) -> None:
        """All parts that the actor sent. Responses under way go on with them."""
        self.check_sampling()
        built(self.weight_sync).receive(buckets, version, self.kv_cache)

    # By broadcast, from the actor's first rank to all ranks of the rollout.

    @role_method(Dispatch.ONE_TO_ALL_FIRST_ANSWERS)
    def open_weight_channel(self) -> MeetingPoint | None:
        """Where the rollout's ranks find the actor's first."""
        if self.rank != 0:
            return None
        self.store, point = WeightChannel.open(self.master_addr)
        return point

    @role_method(Dispatch.ONE_TO_ALL)
    def join_weight_channel(self, point: MeetingPoint, num_receivers: int, *, sends: bool) -> None:
        """Meet the others; both groups are called at the same time."""
        device, size, timeout = self.run.device, num_receivers + 1, self.run.collective_timeout_seconds
        if not sends:
            if point.sender == this_process():
                raise ConfigError(
                    "actor_rollout_ref.rollout.weight_transfer=broadcast wants actor and rollout in processes of their "
                    "own, and here they share one, which would wait for itself. Set it to object_store."
                )
            self.channel = WeightChannel.join(point, self.rank + 1, size, device, timeout)
        elif self.store is not None:
            self.channel = WeightChannel(self.store, 0, size, device, timeout)

    @role_method(Dispatch.ONE_TO_ALL)
    def ready_for_weights(self) -> bool:
        """Answers when the calls before have ended. Each side waits for the other's answers before it begins: so no
        collective runs into its time limit, and a rollout that samples beside its calls goes on until then."""
        return True

    @role_method(Dispatch.ONE_TO_ALL)
    def broadcast_weights(self, ready: list[bool], wanted: WantedWeights) -> None:
        """Send the policy's weights to `receive_broadcast`, and again if it asks. All ranks gather, the first sends."""
        del ready
        while True:
            weights = self.named_policy(adapter=wanted.adapter)
            if self.channel is not None:
                digests: dict[str, str] = {}
                self.channel.send(with_digests(in_numbers(weights, wanted.dtype), digests), BUCKET_BYTES)
                self.channel.send_line(json.dumps({"version": self.version, "digests": digests}).encode())
            for _ in weights:  # those of other ranks
                pass
            if not wanted.twice:
                return
            asked = self.channel is not None and self.channel.any_process(found=False)
            if not built(self.actor).sum_over_ranks(float(asked)):
                return
            wanted = replace(wanted, twice=False)

    @role_method(Dispatch.ONE_TO_ALL)
    def receive_broadcast(self, ready: list[bool], version: int) -> None:
        """What `broadcast_weights` sends. Responses under way go on with it."""
        del ready
        self.check_sampling()
        channel, sync = built(self.channel), built(self.weight_sync)
        came: dict[str, str] = {}

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            came.clear()
            return with_digests(channel.receive(), came)

        def lost() -> str | None:
            sent = json.loads(channel.receive_line())
            return arrival_problem(came, sent["digests"], version, sent["version"])

        sync.bring(weights, version, self.kv_cache, any_process=channel.any_process, lost=lost)


def in_numbers(named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The same with floating point numbers of `dtype`."""
    for name, tensor in named_tensors:
        yield name, tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def with_digests(
    named_tensors: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same; `digests` gets that of each."""
    for name, tensor in named_tensors:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def sealed(named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Iterator[DataProto]:
    """The weights in parts, each with the digests of its tensors and their version."""
    digests: dict[str, str] = {}
    for bucket in in_buckets(with_digests(named_tensors, digests)):
        own = {name: digests[name] for name in bucket}
        yield DataProto(meta_info={"weights": bucket, "digests": own, "version": version})


def in_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """The policy's weights in parts, for a rollout in other processes.

    In their order, in dictionaries of at most `max_bytes` (BUCKET_BYTES); a larger one is alone.

    >>> from torch import zeros
    >>> [list(bucket) for bucket in in_buckets([("a", zeros(2)), ("b", zeros(2)), ("c", zeros(9))], max_bytes=16)]
    [['a', 'b'], ['c']]
    """
    max_bytes = max_bytes or BUCKET_BYTES
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    yield bucket
