"""What a configuration chooses by name: where each lives, the package that it needs, and what it can do.

A `Catalog` is data alone: nothing here imports what it names, so that a bad configuration is answered at once. The
checks and `paceline doctor` read it. A `Registry` finds the functions or classes behind the names, and adds to the
catalogue what a user registers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from paceline.errors import ConfigError
from paceline.text import unknown_choice

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RejectionCriterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLossKind = Literal[KLKind, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


@dataclass(frozen=True)
class NameEntry:
    """What is known of a name before anything is imported."""

    module: str = ""
    """What registers it when it is imported; empty for what a user registers."""


Entry = TypeVar("Entry", bound=NameEntry)
T = TypeVar("T")


@dataclass(frozen=True)
class EstimatorEntry(NameEntry):
    """An estimator of advantages."""

    needs_critic: bool = False
    """It reads values."""
    needs_groups: bool = False
    """It compares the responses to one prompt."""
    needs_baseline: bool = False
    """It compares with a greedy response."""
    needs_components: bool = False
    """It reads the parts of the scores that algorithm.gdpo_reward_keys names."""
    needs_sum_pi_squared: bool = False
    """It reads the squared probabilities of all tokens, summed, at each token."""


@dataclass(frozen=True)
class LossEntry(NameEntry):
    """A policy loss."""

    loss_agg_mode: str = "token-mean"
    """How its token losses become one number, unless the user says otherwise."""
    clip_ratio_c: float = 3.0
    """Its dual clip, or bound of a weight, unless the user says otherwise."""
    chooses_tokens: bool = False
    """It treats a few tokens of the mini-batch, those of high covariance, in another way."""
    weighs_responses: bool = False
    """Importance weights enter it as one for each response: the geometric mean of those of its tokens."""


@dataclass(frozen=True)
class BackendEntry(NameEntry):
    """A training backend."""

    package: str | None = None
    """What has to be installed for it, if that is no part of paceline."""
    lora: bool = False
    """It trains adapters."""
    bfloat16: bool = True
    """It computes in other numbers than float32."""
    offload: bool = True
    """It can keep in main memory what it holds, between calls."""
    compiles: bool = False
    """It can compile the layers of a model."""
    packing: bool = True
    """It takes sequences without padding, one after the other."""
    tensor_parallel: bool = False
    """It divides layers between devices; the section of its name says between how many."""
    ulysses: bool = False
    """Its devices can share sequences, as many as ulysses_sequence_parallel_size says."""
    many_devices: bool = True
    """It trains on more than one device."""
    several_tokens: bool = False
    """At each place it gives the log-probs of several tokens, not of the sampled one alone."""


@dataclass(frozen=True)
class OptionalEntry(NameEntry):
    """What may need a package that paceline does not require."""

    requirement: str | None = None
    """The package, with the version that it was tried with."""

    @property
    def package(self) -> str | None:
        return self.requirement and self.requirement.partition("==")[0]


@dataclass(frozen=True)
class RolloutEntry(OptionalEntry):
    """A rollout engine."""

    tensor_parallel: bool = True
    """It can share a model between devices."""
    takes_requests_singly: bool = True
    """Requests come and go one by one while others are sampled; else a batch is sampled to its end."""


@dataclass(frozen=True)
class LoggerEntry(OptionalEntry):
    """A place where metrics go."""


class Catalog(Generic[Entry]):
    """The names that one key can have: those that are built in, and those that were registered in this process."""

    def __init__(self, key: str, built_in: Mapping[str, Entry]) -> None:
        self.key = key
        self.built_in = built_in
        self._registered: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Make a name known."""
        self._registered[name] = entry

    def get(self, name: str) -> Entry | None:
        """What is known of `name`; None if nobody registered it."""
        return self._registered.get(name) or self.built_in.get(name)

    @property
    def modules(self) -> dict[str, str]:
        """Where the built-in ones are registered when they are imported."""
        return {name: entry.module for name, entry in self.built_in.items()}


class Registry(Generic[T, Entry]):
    """The functions or classes, each a T, behind the names of a catalogue.

    A module that registers a built-in one is imported when that is first asked for, since it may need a heavy or
    optional package.
    """

    def __init__(self, catalog: Catalog[Entry]) -> None:
        self._catalog = catalog
        self._entries: dict[str, T] = {}

    @property
    def entries(self) -> Mapping[str, T]:
        """What is registered, by name."""
        return MappingProxyType(self._entries)

    def register(self, name: str, entry: Entry | None = None, *, override: bool = False) -> Callable[[T], T]:
        """Decorator: make the decorated object, a T, available as `name`; `entry` describes one that is not built in.

        The same object may be registered again, also from a module that was imported twice; the latest is kept. With
        `override`, another one takes its place.
        """

        def decorate(named: T) -> T:
            known = self._entries.get(name)
            is_other = _identity(known) != _identity(named) or entry not in (None, self._catalog.get(name))
            if known is not None and is_other and not override:
                raise ConfigError(f"{self._catalog.key}={name} is already registered as {known!r}; take another name.")
            self._entries[name] = named
            if entry is not None:
                self._catalog.add(name, entry)
            return named

        return decorate

    def get(self, name: str) -> T:
        """What is registered as `name`; ConfigError when there is nothing."""
        if name not in self._entries and name in self._catalog.built_in:
            importlib.import_module(self._catalog.built_in[name].module)
        if name not in self._entries:
            raise self._unknown(name)
        return self._entries[name]

    def entry(self, name: str) -> Entry:
        """What the catalogue says of `name`; ConfigError when there is nothing."""
        entry = self._catalog.get(name)
        if entry is None:
            raise self._unknown(name)
        return entry

    def _unknown(self, name: str) -> ConfigError:
        known = sorted(self._catalog.built_in.keys() | self._entries)
        return ConfigError(unknown_choice(self._catalog.key, name, known))


def _identity(named: object) -> object:
    """What two imports of a function or class have in common: where it is defined. Of a record, that of its fields."""
    if isinstance(named, partial):
        return _identity(named.func), named.args, named.keywords
    if is_dataclass(named) and not isinstance(named, type):
        return tuple(_identity(getattr(named, field.name)) for field in fields(named))
    name = getattr(named, "__qualname__", "<")
    return named if "<" in name else (named.__module__, name)  # a lambda or an inner function has no name of its own


_BY_TOKEN = "paceline.algorithms.advantages_by_token"
_BY_GROUP = "paceline.algorithms.advantages_by_group"
_TOKEN_BASELINES = "paceline.algorithms.token_baselines"
_LOSSES = "paceline.algorithms.policy_loss"
_UNCLIPPED = "paceline.algorithms.unclipped_losses"
_COVARIANCE = "paceline.algorithms.covariance_losses"
_BACKENDS = "paceline.engine.backends"
_TRACKERS = "paceline.report.trackers"
_PACKAGE_TRACKERS = "paceline.report.package_trackers"

ESTIMATORS = Catalog(
    "algorithm.adv_estimator",
    {
        "gae": EstimatorEntry(_BY_TOKEN, needs_critic=True),
        "grpo": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "grpo_vectorized": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "grpo_passk": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "gdpo": EstimatorEntry(_BY_GROUP, needs_groups=True, needs_components=True),
        "rloo": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "rloo_vectorized": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "opo": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "gpg": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "reinforce_plus_plus": EstimatorEntry(_BY_TOKEN),
        "reinforce_plus_plus_baseline": EstimatorEntry(_BY_GROUP, needs_groups=True),
        "remax": EstimatorEntry(_BY_TOKEN, needs_baseline=True),
        "optimal_token_baseline": EstimatorEntry(_TOKEN_BASELINES, needs_groups=True, needs_sum_pi_squared=True),
        "tir_optimal_token_baseline": EstimatorEntry(_TOKEN_BASELINES, needs_groups=True, needs_sum_pi_squared=True),
    },
)
LOSSES = Catalog(
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    {
        "vanilla": LossEntry(_LOSSES),
        "gspo": LossEntry(_LOSSES, loss_agg_mode="seq-mean-token-mean"),
        "cispo": LossEntry(_LOSSES),
        "geo_mean": LossEntry(_LOSSES, loss_agg_mode="seq-mean-token-mean", weighs_responses=True),
        "clip_cov": LossEntry(_COVARIANCE, chooses_tokens=True),
        "kl_cov": LossEntry(_COVARIANCE, chooses_tokens=True),
        "sapo": LossEntry(_UNCLIPPED, loss_agg_mode="seq-mean-token-mean"),
        "dppo_tv": LossEntry(_UNCLIPPED, clip_ratio_c=20.0),
        "dppo_kl": LossEntry(_UNCLIPPED, clip_ratio_c=20.0),
        "gpg": LossEntry(_UNCLIPPED),
        "dro": LossEntry(_UNCLIPPED),
        "bypass_mode": LossEntry(_UNCLIPPED),
    },
)
BACKENDS = Catalog(
    "strategy",
    {
        "local": BackendEntry(
            f"{_BACKENDS}.local_engine", lora=True, compiles=True, many_devices=False, several_tokens=True
        ),
        "fsdp": BackendEntry(f"{_BACKENDS}.fsdp", several_tokens=True),
        "fsdp2": BackendEntry(f"{_BACKENDS}.fsdp", lora=True, ulysses=True, several_tokens=True),
        "torchtitan": BackendEntry(
            f"{_BACKENDS}.torchtitan",
            package="torchtitan",
            bfloat16=False,
            offload=False,
            packing=False,
            tensor_parallel=True,
        ),
        "veomni": BackendEntry(f"{_BACKENDS}.veomni", package="veomni", bfloat16=False, several_tokens=True),
        "megatron": BackendEntry(
            f"{_BACKENDS}.megatron",
            package="megatron",
            bfloat16=False,
            packing=False,
            tensor_parallel=True,
        ),
    },
)
ROLLOUTS = Catalog(
    "actor_rollout_ref.rollout.name",
    {
        "native": RolloutEntry("paceline.rollout.native", tensor_parallel=False),
        "vllm": RolloutEntry("paceline.rollout.vllm", requirement="vllm==0.32.0"),
        "hf": RolloutEntry("paceline.rollout.hf", tensor_parallel=False, takes_requests_singly=False),
    },
)
LOGGERS = Catalog(
    "trainer.logger",
    {
        "console": LoggerEntry(_TRACKERS),
        "tensorboard": LoggerEntry(_TRACKERS),
        "wandb": LoggerEntry(_PACKAGE_TRACKERS, requirement="wandb==0.28.2"),
        "mlflow": LoggerEntry(_PACKAGE_TRACKERS, requirement="mlflow==3.17.2"),
        "swanlab": LoggerEntry(_PACKAGE_TRACKERS, requirement="swanlab==0.10.3"),
        "trackio": LoggerEntry(_PACKAGE_TRACKERS, requirement="trackio==0.43.0"),
    },
)
_AGENTS = "paceline.agents"
AGENT_LOOPS = Catalog(
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    {
        "single_turn_agent": NameEntry(f"{_AGENTS}.loops"),
        "tool_agent": NameEntry(f"{_AGENTS}.loops"),
    },
)
TOOL_FORMATS = Catalog(
    "actor_rollout_ref.rollout.multi_turn.format",
    {
        "hermes": NameEntry(f"{_AGENTS}.parsers"),
        "json": NameEntry(f"{_AGENTS}.parsers"),
    },
)
