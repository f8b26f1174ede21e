"""New weights for a rollout, and the proof that it has them.

Every time, what the engine holds afterwards is compared with what the actor gave: by its bytes or, where those can't be
read, by a layer's answer (`paceline.rollout.held_weights`). Weights that go to other processes carry their version and
digests, so that what arrives is compared, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch

from paceline.errors import WeightMismatchError
from paceline.protocol import DataProto
from paceline.protocol.digest import tensor_digest
from paceline.rollout import RolloutEngine
from paceline.rollout.held_weights import WeightProof
from paceline.rollout.rollout_interface import CachePolicy

logger = logging.getLogger(__name__)

OnMismatch = Literal["stop", "resend", "warn"]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
BUCKET_BYTES = 256 * 2**20
"""Large enough that calls cost nothing beside it, small enough that a rank never holds much of the model twice."""
MOST_NAMES = 4


class WeightSync:
    """Brings weights to one rollout engine. `on_mismatch` says what to do where they did not arrive."""

    def __init__(self, rollout: RolloutEngine, on_mismatch: OnMismatch) -> None:
        self._rollout = rollout
        self._on_mismatch = on_mismatch
        self._has_said = False

    def bring(
        self,
        weights: Callable[[], NamedTensors],
        version: int | None,
        kv_cache: CachePolicy,
        any_rank: Callable[[bool], bool] = lambda found: found,
    ) -> None:
        """Let the engine take the weights, once or, with `resend`, twice.

        `any_rank` says whether any of the ranks that give the weights found something; all of them must bring them.
        """
        for is_last in (self._on_mismatch != "resend", True):
            problem = self._bring_once(weights(), version, kv_cache)
            if not any_rank(problem is not None):
                return
            if is_last:
                break
            logger.warning("%s They are sent again.", problem or "Another rank's rollout lacks weights.")
        if problem is not None:
            self.complain(problem)

    def _bring_once(self, weights: NamedTensors, version: int | None, kv_cache: CachePolicy) -> str | None:
        """What is wrong afterwards."""
        held = self._rollout.held_weights()
        if held is None:
            self._say(f"{type(self._rollout).__name__} can't say what it holds: its weights are not compared.")
            self._rollout.update_weights(weights, version, kv_cache)
            return None
        proof = WeightProof(held)
        self._rollout.update_weights(proof.noted(weights), version, kv_cache)
        differing = proof.differing()
        if proof.unproven:
            self._say(f"where the rollout keeps {some(proof.unproven)} is not known: these are not compared.")
        if not differing:
            return None
        return (
            f"the rollout does not hold the actor's weights of version {self._rollout.version}: {len(differing)} of "
            f"{len(held)} differ, {some(differing)}."
        )

    def receive(self, buckets: Sequence[DataProto], version: int | None, kv_cache: CachePolicy) -> None:
        """Weights that came from other processes, as `packed` made them."""
        if problems := list(arrival_problems(buckets, version)):
            self.complain(f"weights did not arrive as they were sent: {'; '.join(problems)}.")
        self.bring(lambda: unpacked(buckets), version, kv_cache)

    def require_version(self, wanted: int | None) -> None:
        """Before sampling: the engine has the weights that the driver counts on; None: it said nothing."""
        if wanted is not None and wanted != self._rollout.version:
            self.complain(
                f"the rollout has the weights of version {self._rollout.version}, and is to sample with those of "
                f"version {wanted}."
            )

    def complain(self, problem: str) -> None:
        """Stop, or warn and go on."""
        if self._on_mismatch != "warn":
            raise WeightMismatchError(
                f"{problem} What it samples would be of another model, so the run stops; "
                "actor_rollout_ref.rollout.on_weight_mismatch=warn goes on all the same."
            )
        logger.warning("%s The run goes on (actor_rollout_ref.rollout.on_weight_mismatch=warn).", problem)

    def say_shared(self) -> None:
        """The rollout samples from the actor's own module."""
        self._say("the rollout samples from the actor's own tensors: there are no copies to compare.", logging.INFO)

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if not self._has_said:
            self._has_said = True
            logger.log(level, "%s", text)


def some(names: Sequence[str]) -> str:
    """The first of many names.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c, d and 1 more'
    """
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def packed(named_tensors: NamedTensors, version: int) -> Iterator[DataProto]:
    """The weights in parts, each with the digests of its tensors and their version."""
    digests: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            digests[name] = tensor_digest(tensor)
            yield name, tensor

    for bucket in in_buckets(noted()):
        own = {name: digests[name] for name in bucket}
        yield DataProto(meta_info={"weights": bucket, "digests": own, "version": version})


def unpacked(buckets: Sequence[DataProto]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of all parts."""
    return (item for bucket in buckets for item in bucket.meta_info["weights"].items())


def arrival_problems(buckets: Sequence[DataProto], version: int | None) -> Iterator[str]:
    """How parts differ from what was sent. Those of other making need carry neither version nor digests."""
    for number, meta in enumerate(bucket.meta_info for bucket in buckets):
        sent = meta.get("version", version)
        if None not in (version, sent) and sent != version:
            yield f"part {number} is of version {sent}, not {version}"
        weights, digests = meta["weights"], meta.get("digests")
        if digests is not None:
            wrong = [name for name in {**weights, **digests} if not _arrived(weights, digests, name)]
            if wrong:
                yield f"{some(wrong)} of part {number} differ from what the actor sent"


def _arrived(weights: dict[str, torch.Tensor], digests: dict[str, str], name: str) -> bool:
    return name in weights and digests.get(name) == tensor_digest(weights[name])


def in_buckets(named_tensors: NamedTensors, max_bytes: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
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
