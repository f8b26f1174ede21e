"""What is asked of a rollout engine, and what comes back.

>>> SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9)
SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9, top_k=-1, do_sample=True, ignore_eos=False)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.errors import ConfigError, DataError, NonFiniteError, PacelineError

RequestId = str | int


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
    """False: cut off at max_tokens, or aborted."""
    versions: list[int] = field(default_factory=list)
    """Of each token, the version of the weights that sampled it."""


@dataclass(frozen=True)
class Request:
    """One response that is wanted, here the second sample of a prompt:

    Request(id="17-1", prompt_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=64), seed=4711)
    """

    id: RequestId
    """The caller's name for it, unique among what is under way or waits to be collected."""
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    """The only source of its random numbers: that of a token is made from the seed and the token's place."""
    group: str | None = None
    """What it shares a prompt with, for a caller that divides requests among engines. Engines do not look at it."""
    sampled: Completion | None = None
    """What an earlier request sampled before it was aborted. This one goes on from there, and its response begins with
    those tokens, their log-probs and their versions."""

    @property
    def context(self) -> list[int]:
        """The prompt, and the tokens that were sampled already."""
        return self.prompt_ids + self.sampled.token_ids if self.sampled is not None else self.prompt_ids

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled already."""
        return len(self.sampled.token_ids) if self.sampled is not None else 0


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
