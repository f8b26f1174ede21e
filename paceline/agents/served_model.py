"""A trained model's answers to clients of OpenAI's protocol: each request is for itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.agents.choice_reader import ChoiceReader
from paceline.agents.conversation import Sampled
from paceline.agents.link import EngineLink
from paceline.agents.openai_messages import BadRequestError, BusyError, Choice, WantedCompletion
from paceline.agents.parsers import ToolFormat
from paceline.agents.template import ChatTemplate
from paceline.agents.wire import Wanted


@dataclass(frozen=True)
class ServingLimits:
    """What one server does at most, and what it does unless it is asked for something else."""

    context_tokens: int
    """Of a prompt and its answer."""
    max_tokens: int
    """Of an answer that names no length."""
    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    answers: int
    """That are sampled or wait, of all clients."""


class ServedModel:
    """Answers by a rollout that `link` reaches; requests of all clients are decoded together."""

    def __init__(
        self, link: EngineLink, template: ChatTemplate, tool_format: ToolFormat, limits: ServingLimits, seed: int
    ) -> None:
        self.template = template
        self.tool_format = tool_format
        self._link = link
        self._limits = limits
        self._seed = seed
        self._numbers = itertools.count()
        self._num_open = 0

    async def answer(self, asked: WantedCompletion, readers: Sequence[ChoiceReader]) -> tuple[list[Choice], int]:
        """The answers, and how many tokens they were sampled after."""
        prompt_ids = self._prompt(asked)
        if self._num_open + asked.n > self._limits.answers:
            raise BusyError(
                f"{self._num_open} of {self._limits.answers} places for answers are taken; try again later, or start "
                "the server with a higher --max-requests"
            )
        self._num_open += asked.n
        try:
            request = next(self._numbers)
            wanted = [self._wanted(asked, prompt_ids, request, place) for place in range(asked.n)]
            turns = [self._link.sample(0, *pair) for pair in zip(wanted, readers, strict=True)]
            choices = [
                self._choice(asked, reader, sampled, f"{request}-{place}")
                for place, (reader, sampled) in enumerate(zip(readers, await asyncio.gather(*turns), strict=True))
            ]
            return choices, len(prompt_ids)
        finally:
            self._num_open -= asked.n

    def _prompt(self, asked: WantedCompletion) -> list[int]:
        text = self.template.render(asked.messages, asked.tools) if asked.is_chat else asked.prompt
        prompt_ids = self.template.encode(text)
        most = self._limits.context_tokens - (asked.max_tokens or 1)
        if not 0 < len(prompt_ids) <= most:
            raise BadRequestError(
                f"the prompt has {len(prompt_ids)} tokens; with answers of {asked.max_tokens or 1} it may have 1 to "
                f"{max(0, most)}, as the model reads {self._limits.context_tokens}"
            )
        return prompt_ids

    def _wanted(self, asked: WantedCompletion, prompt_ids: list[int], request: int, place: int) -> Wanted:
        limits = self._limits
        temperature = limits.temperature if asked.temperature is None else asked.temperature
        top_p = limits.top_p if asked.top_p is None else asked.top_p
        if not 0 < top_p <= 1:
            raise BadRequestError(f"top_p is {top_p}; it must be above 0 and at most 1")
        numbers = (self._seed, request, place) if asked.seed is None else (asked.seed % 2**64, place)
        return Wanted(
            f"{request}-{place}",
            request,
            prompt_ids,
            min(asked.max_tokens or limits.max_tokens, limits.context_tokens - len(prompt_ids)),
            int(np.random.SeedSequence(numbers).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1)),
            sampling={
                "temperature": temperature or 1.0,
                "top_p": top_p,
                "top_k": limits.top_k,
                "do_sample": temperature > 0,
            },
            is_watched=True,
        )

    def _choice(self, asked: WantedCompletion, reader: ChoiceReader, sampled: Sampled, name: str) -> Choice:
        last = (sampled.token_ids[-1], sampled.log_probs[-1]) if sampled.finished_by_eos else None
        reader.end(last=last)
        calls = self.tool_format.calls(reader.text) if asked.tools else []
        return Choice.of(reader, calls[:1] if asked.one_call else calls, name)
