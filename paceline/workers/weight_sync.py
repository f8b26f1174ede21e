"""New weights for a rollout, and the proof that it has them.

Every time, what the engine holds afterwards is compared with what the actor gave: by its bytes or, where those can't be
read, by a layer's answer (`paceline.rollout.held_weights`). Weights that go to other processes carry their version and
digests, so that what arrives is compared, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
MOST_NAMES = 4


class WeightSync:
    """Brings weights to one rollout engine. `on_mismatch` says what to do where they did not arrive."""

    def __init__(self, rollout: RolloutEngine, on_mismatch: OnMismatch) -> None:
        self._rollout = rollout
        self._on_mismatch = on_mismatch
        self._has_said = False

    @property
    def tries(self) -> tuple[bool, ...]:
        """For each time that weights may be sent, whether it is the last."""
        return (False, True) if self._on_mismatch == "resend" else (True,)

    def bring(
        self,
        weights: Callable[[], NamedTensors],
        version: int | None,
        kv_cache: CachePolicy,
        any_process: Callable[[bool], bool] = lambda found: found,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Let the engine take the weights, once or, with `resend`, twice.

        `any_process` says whether any of those that take part found something; all of them must bring the weights.
        `lost` says, when all have come, how they differ from what was sent.
        """
        for is_last in self.tries:
            problem = self._bring_once(weights(), version, kv_cache)
            problem = lost() or problem
            if is_last or not any_process(problem is not None):
                break
            logger.warning("%s They are sent again.", problem or "Another process's rollout lacks weights.")
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
        """Weights that came from other processes, as `weight_calls.sealed` made them."""
        for meta in [bucket.meta_info for bucket in buckets if "digests" in bucket.meta_info]:
            came = {name: tensor_digest(tensor) for name, tensor in meta["weights"].items()}
            if problem := arrival_problem(came, meta["digests"], version, meta["version"]):
                self.complain(problem)
        self.bring(lambda: weights_of(buckets), version, kv_cache)

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


def weights_of(buckets: Sequence[DataProto]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of all parts."""
    return (item for bucket in buckets for item in bucket.meta_info["weights"].items())


def arrival_problem(
    came: Mapping[str, str], sent: Mapping[str, str], version: int | None, sent_version: int | None
) -> str | None:
    """How what came differs from what was sent, by digests and version; None: not, or the version is not known."""
    problems = []
    if None not in (version, sent_version) and sent_version != version:
        problems.append(f"they are of version {sent_version}, not {version}")
    if wrong := [name for name in {**sent, **came} if came.get(name) != sent.get(name)]:
        problems.append(f"{some(wrong)} differ from what the actor sent")
    return f"weights did not arrive as they were sent: {'; '.join(problems)}." if problems else None
