"""The interface of a rollout engine, what goes in and out of it, and the engines by name.

>>> SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9)
SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9, top_k=-1, do_sample=True, ignore_eos=False)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from transformers import PreTrainedModel

from paceline.catalog import ROLLOUTS, RolloutEntry
from paceline.config import ModelConfig, RolloutConfig
from paceline.errors import ConfigError, DataError, NonFiniteError, PacelineError
from paceline.registry import Registry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By their names in the configuration."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a response are chosen."""

    max_tokens: int
    """Longest response in tokens, the end-of-sequence token included (>= 1)."""
    temperature: float = 1.0
    """Divides the logits (> 0)."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this probability, in (0, 1]."""
    top_k: int = -1
    """Sample among the k most likely tokens; -1 is no limit. Applied before top_p."""
    do_sample: bool = True
    """False always takes the most likely token; temperature, top_p and top_k then have no part."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token until max_tokens."""

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}; a response needs at least 1 token.")
        if self.temperature <= 0:
            problems.append(
                f"temperature is {self.temperature}; set it above 0, or do_sample=False for greedy decoding."
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; set it in (0, 1]; 1 is no limit.")
        if self.top_k != -1 and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}; set it to -1 for no limit, or to at least 1.")
        if problems:
            raise ConfigError(problems)


@dataclass
class Completion:
    """One response, here with 2 as the end-of-sequence token:

    Completion(token_ids=[17, 4, 2], log_probs=[-0.1, -2.3, -0.7], finished_by_eos=True)
    """

    token_ids: list[int]
    """The sampled tokens, the end-of-sequence token included."""
    log_probs: list[float]
    """Log-prob of each token under the full distribution at the sampling temperature (greedy: temperature 1), that is
    before top_p and top_k cut it: the number that a training engine recomputes."""
    finished_by_eos: bool
    """False: cut off at max_tokens."""


@dataclass(frozen=True)
class RolloutSpec:
    """What a worker's rollout engine is made from."""

    model: ModelConfig
    """Where the model's configuration and first weights are."""
    module: Callable[[], PreTrainedModel]
    """Gives a Hugging Face model to sample from: the actor's own module where it lies whole in this process, else a
    copy that `update_weights` fills. Not called by engines that have models of their own."""
    config: RolloutConfig
    max_prompt_length: int
    max_response_length: int
    eos_token_ids: frozenset[int]
    """The tokenizer's. An engine adds those that the model's generation config names."""
    pad_token_id: int
    device: str
    dtype: torch.dtype = torch.float32
    """Numbers of the forward pass."""


class RolloutEngine(ABC):
    """Samples responses. The caller repeats a prompt to get several responses to it."""

    keeps_own_weights: ClassVar[bool] = False
    """True: its weights are never the actor's own tensors, so every new version comes by `update_weights`."""

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: RolloutSpec) -> RolloutEngine:
        """The engine of a worker."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in the order of the prompts.

        `seeds` has one number per prompt. The random numbers of a request come from its seed alone: neither its
        neighbours nor the order nor the process's global random state have a part in them.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, named as in the Hugging Face model's state dict. All of them must come."""

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that only sampling needs, until `wake`."""

    @abstractmethod
    def wake(self) -> None:
        """Be ready for `generate` again."""


def token_ids(configured: int | list[int] | None) -> set[int]:
    """The end-of-sequence tokens of a generation config, which names none, one or several."""
    if configured is None:
        return set()
    return set(configured) if isinstance(configured, list) else {configured}


def check_requests(prompts: list[list[int]], seeds: list[int]) -> None:
    """Raise on requests that no engine can sample from."""
    if len(seeds) != len(prompts):
        raise PacelineError(f"generate got {len(prompts)} prompts and {len(seeds)} seeds; give one seed per prompt.")
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise DataError(f"prompts {empty[:10]} have no tokens; a causal LM needs at least one token to start from.")


def check_finite(completions: list[Completion]) -> None:
    """Raise NonFiniteError if a log-prob of any response is not finite."""
    if not all(math.isfinite(log_prob) for completion in completions for log_prob in completion.log_probs):
        raise NonFiniteError(
            "sampling met logits that are not finite: the model's weights hold NaN or infinity, or overflow. "
            "Look at actor/grad_norm of the steps before; lower the learning rate."
        )


EngineClass = TypeVar("EngineClass", bound=type[RolloutEngine])
_ENGINES: Registry[type[RolloutEngine]] = Registry("actor_rollout_ref.rollout.name", ROLLOUTS.modules)


def register_rollout(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes a rollout engine known under `name`."""

    def decorate(engine: EngineClass) -> EngineClass:
        _ENGINES.register(name)(engine)
        if engine.__module__ != ROLLOUTS.modules.get(name):
            ROLLOUTS.add(name, RolloutEntry(engine.__module__))
        return engine

    return decorate


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
