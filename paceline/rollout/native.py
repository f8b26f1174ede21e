"""The embedded rollout engine: continuous batching in the worker, on a Hugging Face causal LM."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from paceline.private_apis.transformers_private import attention_name, attention_replaced
from paceline.rollout.kv_cache import SlotCache
from paceline.rollout.model_rollout import ModelRollout
from paceline.rollout.rollout_interface import Completion, SamplingParams, register_rollout
from paceline.rollout.token_choice import choose_tokens, random_streams, uniforms
from paceline.speedups import GROUPED_SDPA, LeanForward, is_plain

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 2048
"""Prompt tokens (padding included) of a forward pass, at most: activations need memory."""
EFFICIENT_TOKENS = 512
"""From here on a pass of more tokens is hardly faster per token, so prompts of other lengths get one of their own."""
PROGRESS_SECONDS = 10.0
"""Pause between two progress lines of a long generation."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Cache], torch.Tensor]
"""A forward pass; its arguments and its result are those of `LeanForward`."""


@register_rollout("native")
class NativeRollout(ModelRollout):
    """Samples from a causal LM whose layers are all attention with past_key_values (Qwen, Llama, Mistral, ...).

    At most `max_num_seqs` responses are decoded together; where one ends, the next request takes its place. Nothing is
    computed for responses that have ended, and a prompt that comes several times is computed once. No cache outlives
    `generate`.
    """

    def sample(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        if is_plain(self.model):
            return _Generation(self, LeanForward(self.model), prompts, sampling, seeds).run()
        attention = attention_name(self.model)
        with attention_replaced(self.model, GROUPED_SDPA if attention == "sdpa" else attention):
            return _Generation(self, partial(_last_logits, self.model), prompts, sampling, seeds).run()


class _Generation:
    """One call of `generate`. A request goes from `waiting` to `ready`, when its prompt is computed, to `rows`."""

    def __init__(
        self,
        engine: NativeRollout,
        last_logits: Forward,
        prompts: list[list[int]],
        sampling: SamplingParams,
        seeds: list[int],
    ) -> None:
        self.last_logits = last_logits
        self.model, self.pad_token_id, self.max_num_seqs = engine.model, engine.pad_token_id, engine.max_num_seqs
        self.sampling, self.eos = sampling, set() if sampling.ignore_eos else set(engine.eos_token_ids)
        self.prompts, self.streams = prompts, random_streams(seeds)
        self.completions = [Completion([], [], False) for _ in prompts]
        requests_of: dict[tuple[int, ...], list[int]] = {}
        for request, prompt in enumerate(prompts):
            requests_of.setdefault(tuple(prompt), []).append(request)
        # Similar lengths together, so that little padding is computed; taken from the end, the longest first.
        self.waiting = sorted(requests_of.items(), key=lambda item: len(item[0]))
        self.prefilled = DynamicCache()
        self.ready: deque[tuple[int, int]] = deque()  # requests, and where in `prefilled` their prompts are
        self.rows: list[int] = []  # the request of each row of `cache`
        self.cache = SlotCache(min(self.max_num_seqs, len(prompts)))
        self.progress = _Progress(len(prompts))

    def run(self) -> list[Completion]:
        ended: list[int] = []
        while True:
            self._fill(ended)
            if not self.rows:
                return self.completions
            ended = self._step()

    def _fill(self, ended: list[int]) -> None:
        """Give the rows that have ended, and those not yet in use, to the next requests; close the gaps that remain."""
        while (num_free := self.max_num_seqs - len(self.rows) + len(ended)) and (self.ready or self.waiting):
            if not self.ready:
                self._prefill()
                continue
            entering = [self.ready.popleft() for _ in range(min(num_free, len(self.ready)))]
            slots = [*ended, *range(len(self.rows), self.max_num_seqs)][: len(entering)]
            ended = ended[len(entering) :]
            self.rows += [0] * (slots[-1] + 1 - len(self.rows))
            for slot, (request, _) in zip(slots, entering, strict=True):
                self.rows[slot] = request
            longest = max(len(self.prompts[request]) for request, _ in entering)
            self.cache.put(slots, self.prefilled, [source for _, source in entering], longest)
        if ended:
            num_rows = len(self.rows) - len(ended)
            gaps = [row for row in ended if row < num_rows]
            last = sorted({*range(num_rows, len(self.rows))} - {*ended})
            for row, gap in zip(last, gaps, strict=True):
                self.rows[gap] = self.rows[row]
            del self.rows[num_rows:]
            if gaps:
                self.cache.move(last, gaps)

    def _prefill(self) -> None:
        """Compute the longest prompts that wait, similar lengths in one pass, and the first tokens after them."""
        width = len(self.waiting[-1][0])
        count = 1
        for prompt, _ in self.waiting[-2 : -self.max_num_seqs - 1 : -1]:
            tokens = width * (count + 1)
            if tokens > PREFILL_TOKENS or (tokens > EFFICIENT_TOKENS and len(prompt) < 7 / 8 * width):
                break
            count += 1
        self.waiting, part = self.waiting[:-count], self.waiting[-count:]
        padding = [width - len(prompt) for prompt, _ in part]
        self.prefilled = DynamicCache()
        padded = [[self.pad_token_id] * left + [*prompt] for left, (prompt, _) in zip(padding, part, strict=True)]
        logits = self._forward(padded, padding, self.prefilled)
        entering = [(request, source) for source, (_, requests) in enumerate(part) for request in requests]
        for start in range(0, len(entering), self.max_num_seqs):
            some = entering[start : start + self.max_num_seqs]
            ended = {*self._choose([request for request, _ in some], logits[[source for _, source in some]])}
            self.ready += [pair for place, pair in enumerate(some) if place not in ended]

    def _step(self) -> list[int]:
        """One more token for every row; gives the rows that have ended."""
        completions = [self.completions[request] for request in self.rows]
        lengths = [  # in the cache, which the last token is about to join
            len(self.prompts[request]) + len(completion.token_ids) - 1
            for request, completion in zip(self.rows, completions, strict=True)
        ]
        longest = max(lengths)
        self.cache.slots = min(self.cache.slots, self.progress.remaining)
        self.cache.extend(longest)
        last_tokens = [completion.token_ids[-1:] for completion in completions]
        return self._choose(self.rows, self._forward(last_tokens, [longest - length for length in lengths], self.cache))

    def _forward(self, input_ids: list[list[int]], padding: list[int], cache: Cache) -> torch.Tensor:
        """Logits (rows, vocabulary) after the last position. `padding` are the columns left of each row's first."""
        num_new, device = len(input_ids[0]), self.model.device
        columns = torch.arange(cache.get_mask_sizes(num_new, 0)[0], device=device)
        left = torch.tensor(padding, device=device)[:, None]
        tokens = torch.tensor(input_ids, device=device)
        positions = (columns[-num_new:] - left).clamp(min=0)
        visible = columns >= left if any(padding) else None
        return self.last_logits(tokens, positions, visible, cache)

    def _choose(self, requests: list[int], logits: torch.Tensor) -> list[int]:
        """Append a token to each of these requests; gives the places in `requests` of those that have ended."""
        completions = [self.completions[request] for request in requests]
        positions = np.array([len(completion.token_ids) for completion in completions], dtype=np.uint64)
        uniform = uniforms(self.streams[requests], positions).to(logits.device)
        tokens, log_probs = choose_tokens(logits, uniform, self.sampling)
        ended = []
        chosen = zip(completions, tokens.tolist(), log_probs.tolist(), strict=True)
        for place, (completion, token, log_prob) in enumerate(chosen):
            completion.token_ids.append(token)
            completion.log_probs.append(log_prob)
            completion.finished_by_eos = token in self.eos
            if completion.finished_by_eos or len(completion.token_ids) == self.sampling.max_tokens:
                ended.append(place)
        self.progress.add(tokens=len(requests), responses=len(ended))
        return ended


def _last_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None, cache: Cache
) -> torch.Tensor:
    """The same as `LeanForward` returns, by the model's own forward pass."""
    output = model(
        input_ids=input_ids,
        attention_mask=visible,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


class _Progress:
    """Logs the progress of a generation every PROGRESS_SECONDS."""

    def __init__(self, total: int) -> None:
        self.total = self.remaining = total
        self.tokens = 0
        self.start = self.last_line = time.monotonic()

    def add(self, *, tokens: int, responses: int) -> None:
        self.tokens += tokens
        self.remaining -= responses
        now = time.monotonic()
        if now - self.last_line >= PROGRESS_SECONDS:
            self.last_line = now
            done, rate = self.total - self.remaining, self.tokens / (now - self.start)
            logger.info("rollout: %d of %d responses done, %s tokens/s", done, self.total, f"{rate:,.0f}")
