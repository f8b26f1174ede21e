"""What a configuration chooses by name: where each lives, the package that it needs, and what it can do.

Data alone: nothing here imports what it names, so that a bad configuration is answered at once. The checks, the
registries and `paceline doctor` read it; registering a name adds to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class _Described(Protocol):
    @property
    def module(self) -> str: ...


Entry = TypeVar("Entry", bound=_Described)


@dataclass(frozen=True)
class EstimatorEntry:
    """An estimator of advantages."""

    module: str
    needs_critic: bool = False
    """It reads values."""
    needs_groups: bool = False
    """It compares the responses to one prompt."""
    needs_baseline: bool = False
    """It compares with a greedy response."""


@dataclass(frozen=True)
class LossEntry:
    """A policy loss."""

    module: str
    loss_agg_mode: str = "token-mean"
    """How its token losses become one number, unless the user says otherwise."""


@dataclass(frozen=True)
class BackendEntry:
    """A training backend."""

    module: str
    package: str | None = None
    """What has to be installed for it, if that is no part of paceline."""
    lora: bool = False
    """It trains adapters."""
    bfloat16: bool = True
    """It computes in other numbers than float32."""
    offload: bool = True
    """It can keep in main memory what it holds, between calls."""
    packing: bool = True
    """It takes sequences without padding, one after the other."""
    tensor_parallel: bool = False
    """It divides layers between devices; the section of its name says between how many."""
    many_devices: bool = True
    """It trains on more than one device."""
    recomputes_on_cpu: bool = True
    """It has gradient checkpointing on a CPU."""


@dataclass(frozen=True)
class RolloutEntry:
    """A rollout engine."""

    module: str
    package: str | None = None
    """What has to be installed for it, if that is no part of paceline."""
    tensor_parallel: bool = True
    """It can share a model between devices."""


@dataclass(frozen=True)
class LoggerEntry:
    """A place where metrics go."""

    module: str
    requirement: str | None = None
    """The package that has to be installed for it, with its version, if paceline does not require it."""

    @property
    def package(self) -> str | None:
        return self.requirement and self.requirement.partition("==")[0]


class Catalog(Generic[Entry]):
    """The names of one kind: those that are built in, and those that were registered in this process."""

    def __init__(self, built_in: Mapping[str, Entry]) -> None:
        self.built_in = built_in
        self._registered: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Make a name known."""
        self._registered[name] = entry

    def get(self, name: str) -> Entry | None:
        """What is known of `name`; None if nobody registered it."""
        return self._registered.get(name) or self.built_in.get(name)

    def with_registered(self, asked: Iterable[str]) -> dict[str, Entry]:
        """What is built in, and those of the `asked` that were registered."""
        return {**self.built_in, **{name: entry for name in asked if (entry := self._registered.get(name))}}

    @property
    def modules(self) -> dict[str, str]:
        """Where the built-in ones are registered when they are imported."""
        return {name: entry.module for name, entry in self.built_in.items()}


_ADVANTAGES = "paceline.algorithms.advantages"
_LOSSES = "paceline.algorithms.policy_loss"
_BACKENDS = "paceline.engine.backends"
_TRACKERS = "paceline.report.trackers"

ESTIMATORS = Catalog(
    {
        "gae": EstimatorEntry(f"{_ADVANTAGES}.token_level", needs_critic=True),
        "grpo": EstimatorEntry(f"{_ADVANTAGES}.group_relative", needs_groups=True),
        "rloo": EstimatorEntry(f"{_ADVANTAGES}.group_relative", needs_groups=True),
        "reinforce_plus_plus": EstimatorEntry(f"{_ADVANTAGES}.token_level"),
        "reinforce_plus_plus_baseline": EstimatorEntry(f"{_ADVANTAGES}.group_relative", needs_groups=True),
        "remax": EstimatorEntry(f"{_ADVANTAGES}.token_level", needs_baseline=True),
    }
)
LOSSES = Catalog(
    {
        "vanilla": LossEntry(_LOSSES),
        "gspo": LossEntry(_LOSSES, loss_agg_mode="seq-mean-token-mean"),
        "cispo": LossEntry(_LOSSES),
    }
)
BACKENDS = Catalog(
    {
        "local": BackendEntry(f"{_BACKENDS}.local_engine", lora=True, many_devices=False),
        "fsdp": BackendEntry(f"{_BACKENDS}.fsdp"),
        "fsdp2": BackendEntry(f"{_BACKENDS}.fsdp", lora=True),
        "torchtitan": BackendEntry(
            f"{_BACKENDS}.torchtitan",
            package="torchtitan",
            bfloat16=False,
            offload=False,
            packing=False,
            tensor_parallel=True,
        ),
        "veomni": BackendEntry(f"{_BACKENDS}.veomni", package="veomni", bfloat16=False, offload=False),
        "megatron": BackendEntry(
            f"{_BACKENDS}.megatron",
            package="megatron",
            bfloat16=False,
            offload=False,
            packing=False,
            tensor_parallel=True,
            recomputes_on_cpu=False,
        ),
    }
)
ROLLOUTS = Catalog(
    {
        "native": RolloutEntry("paceline.rollout.native", tensor_parallel=False),
        "vllm": RolloutEntry("paceline.rollout.vllm", package="vllm"),
        "hf": RolloutEntry("paceline.rollout.hf", tensor_parallel=False),
    }
)
LOGGERS = Catalog(
    {
        "console": LoggerEntry(_TRACKERS),
        "tensorboard": LoggerEntry(_TRACKERS),
        "wandb": LoggerEntry(_TRACKERS, requirement="wandb==0.28.2"),
    }
)
