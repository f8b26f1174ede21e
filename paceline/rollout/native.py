"""The embedded rollout engine: continuous batching in the worker, on a Hugging Face causal LM."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from paceline.private_apis.transformers_private import attention_name, attention_replaced
from paceline.rollout.kv_cache import SlotCache
from paceline.rollout.model_rollout import ModelRollout
from paceline.rollout.rollout_interface import (
    CachePolicy,
    Completion,
    Request,
    RequestId,
    SamplingParams,
    register_rollout,
)
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
    computed for responses that have ended, and prompts that are equal and come together are computed once. No cache
    outlives the last request under way.
    """

    _generation: _Generation | None = None
    """While there are requests."""

    def admit(self, requests: list[Request]) -> None:
        if self._generation is None and requests:
            self._generation = _Generation(self)
        if self._generation is not None:
            streams = random_streams([request.seed for request in requests])
            self._generation.add([self._response(*pair) for pair in zip(requests, streams, strict=True)])

    def _response(self, request: Request, stream: np.uint64) -> _Response:
        sampled = request.sampled or Completion([], [], False)
        completion = Completion([*sampled.token_ids], [*sampled.log_probs], False)
        eos = frozenset() if request.sampling.ignore_eos else frozenset(self.eos_token_ids)
        return _Response(request, request.sampling, completion, stream, eos)

    def step(self) -> None:
        if self._generation is not None:
            with self.decoding():
                self._generation.step()
            if not self._under_way:
                self._generation = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        with super().preparing(), nullcontext() if is_plain(self.model) else self._attention_replaced():
            yield

    def _attention_replaced(self) -> AbstractContextManager[None]:
        attention = attention_name(self.model)
        return attention_replaced(self.model, GROUPED_SDPA if attention == "sdpa" else attention)

    def make_forward(self) -> Forward:
        """A forward pass with the weights of this moment."""
        return LeanForward(self.model) if is_plain(self.model) else partial(_last_logits, self.model)

    @property
    def num_running(self) -> int:
        return self._generation.num_running if self._generation is not None else 0

    @property
    def not_begun(self) -> list[RequestId]:
        ready = [response for response, _ in self._generation.ready] if self._generation is not None else []
        return super().not_begun + [
            response.request.id for response in ready if len(response.completion.token_ids) == 1
        ]

    def withdraw(self, ids: list[RequestId]) -> dict[RequestId, Completion]:
        if self._generation is None:
            return {}
        withdrawn = self._generation.remove(ids)
        if self._under_way.keys() == withdrawn.keys():
            self._generation = None
        return withdrawn

    def num_sampled(self, request: Request) -> int:
        return len(self.sampled_so_far(request).token_ids)

    def sampled_so_far(self, request: Request) -> Completion:
        assert self._generation is not None  # a request is under way
        return self._generation.responses[request.id].completion

    def renew_caches(self, kv_cache: CachePolicy) -> None:
        if self._generation is not None:
            self._generation.last_logits = None
            if kv_cache == "recompute":
                self._generation.start_over()


@dataclass(eq=False, slots=True)
class _Response:
    """A request under way."""

    request: Request
    sampling: SamplingParams
    completion: Completion
    stream: np.uint64
    """The state of its random numbers."""
    eos: frozenset[int]
    is_over: bool = False
    """It has ended, or was aborted."""

    @property
    def num_cached(self) -> int:
        """Positions of a row of the cache, which the last token is about to join."""
        return len(self.request.prompt_ids) + len(self.completion.token_ids) - 1


class _Generation:
    """The requests of an engine, from the first until none is left.

    A request comes to `arrived`; from there it goes to `waiting`, to `ready`, when its prompt is computed, and to
    `rows`. One whose keys and values must be computed again goes back to `waiting`, where its prompt is all that was
    sampled, too.
    """

    def __init__(self, engine: NativeRollout) -> None:
        self.engine = engine
        self.model, self.pad_token_id, self.max_num_seqs = engine.model, engine.pad_token_id, engine.max_num_seqs
        self.last_logits: Forward | None = None  # made when it is first needed: it may hold copies of weights
        self.responses: dict[RequestId, _Response] = {}  # that are not over
        self.samplings: dict[SamplingParams, SamplingParams] = {}
        self.arrived: list[_Response] = []
        self.waiting: list[
            tuple[tuple[int, ...], list[_Response]]
        ] = []  # by what is to be computed; taken from the end
        self.prefilled = DynamicCache()
        self.ready: deque[tuple[_Response, int]] = deque()  # and where in `prefilled` their prompts are
        self.rows: list[_Response] = []  # of `cache`
        self.cache = SlotCache(0)
        self.progress = _Progress()

    @property
    def num_running(self) -> int:
        return sum(not response.is_over for response in self.rows)

    def add(self, responses: list[_Response]) -> None:
        self.arrived += responses
        self.responses |= {response.request.id: response for response in responses}
        for response in responses:  # so that "the same" can be asked of all rows at every step
            response.sampling = self.samplings.setdefault(response.sampling, response.sampling)
        self.cache.slots = max(self.cache.slots, min(self.max_num_seqs, len(self.responses)))
        self.progress.total += len(responses)

    def remove(self, names: list[RequestId]) -> dict[RequestId, Completion]:
        """Forget requests; gives what was sampled of them. Their rows are free."""
        removed = {name: self.responses.pop(name) for name in names}
        for response in removed.values():
            response.is_over = True
        self.arrived = [response for response in self.arrived if not response.is_over]
        going_on = [(context, [other for other in sharing if not other.is_over]) for context, sharing in self.waiting]
        self.waiting = [(context, sharing) for context, sharing in going_on if sharing]
        self.ready = deque(pair for pair in self.ready if not pair[0].is_over)
        self.progress.total -= len(removed)
        return {name: response.completion for name, response in removed.items()}

    def start_over(self) -> None:
        """Throw keys and values away: what had some is computed again, before what waits."""
        begun = [
            response for response in [*self.rows, *(response for response, _ in self.ready)] if not response.is_over
        ]
        self.waiting += _by_context(begun)
        self.prefilled, self.ready, self.rows = DynamicCache(), deque(), []
        self.cache = SlotCache(self.cache.slots)

    def step(self) -> None:
        if self.last_logits is None:
            self.last_logits = self.engine.make_forward()
        try:
            self._fill()
            if self.rows:
                self._step()
        except BaseException:  # what is cached may be half of a step
            self.start_over()
            raise

    def _fill(self) -> None:
        """Give the rows that are free, and those not yet in use, to the next requests; close the gaps that remain."""
        free = [row for row, response in enumerate(self.rows) if response.is_over]
        while num_free := self.max_num_seqs - len(self.rows) + len(free):
            if not self.ready:
                if not self.waiting:
                    self.waiting, self.arrived = _by_context(self.arrived), []
                if not self.waiting:
                    break
                self._prefill()
                continue
            entering = [self.ready.popleft() for _ in range(min(num_free, len(self.ready)))]
            slots = [*free, *range(len(self.rows), self.max_num_seqs)][: len(entering)]
            free = free[len(entering) :]
            self.rows += [entering[0][0]] * (slots[-1] + 1 - len(self.rows))
            for slot, (response, _) in zip(slots, entering, strict=True):
                self.rows[slot] = response
            longest = max(response.num_cached for response, _ in entering)
            self.cache.put(slots, self.prefilled, [source for _, source in entering], longest)
        if free:
            num_rows = len(self.rows) - len(free)
            gaps = [row for row in free if row < num_rows]
            last = sorted({*range(num_rows, len(self.rows))} - {*free})
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
            is_too_short = tokens > EFFICIENT_TOKENS and len(prompt) < 7 / 8 * width
            if tokens > PREFILL_TOKENS or is_too_short or len(prompt) > width:  # longer: it came before
                break
            count += 1
        part = self.waiting[-count:]
        padding = [width - len(prompt) for prompt, _ in part]
        self.prefilled = DynamicCache()
        padded = [[self.pad_token_id] * left + [*prompt] for left, (prompt, _) in zip(padding, part, strict=True)]
        logits = self._forward(padded, padding, self.prefilled)
        del self.waiting[-count:]
        entering = [(response, source) for source, (_, sharing) in enumerate(part) for response in sharing]
        for start in range(0, len(entering), self.max_num_seqs):
            some = entering[start : start + self.max_num_seqs]
            self._choose([response for response, _ in some], logits[[source for _, source in some]])
            self.ready += [pair for pair in some if not pair[0].is_over]

    def _step(self) -> None:
        """One more token for every row."""
        lengths = [response.num_cached for response in self.rows]
        longest = max(lengths)
        self.cache.slots = min(self.cache.slots, len(self.responses))
        self.cache.extend(longest)
        last_tokens = [response.completion.token_ids[-1:] for response in self.rows]
        self._choose(self.rows, self._forward(last_tokens, [longest - length for length in lengths], self.cache))

    def _forward(self, input_ids: list[list[int]], padding: list[int], cache: Cache) -> torch.Tensor:
        """Logits (rows, vocabulary) after the last position. `padding` are the columns left of each row's first."""
        assert self.last_logits is not None
        num_new, device = len(input_ids[0]), self.model.device
        columns = torch.arange(cache.get_mask_sizes(num_new, 0)[0], device=device)
        left = torch.tensor(padding, device=device)[:, None]
        tokens = torch.tensor(input_ids, device=device)
        positions = (columns[-num_new:] - left).clamp(min=0)
        visible = columns >= left if any(padding) else None
        return self.last_logits(tokens, positions, visible, cache)

    def _choose(self, responses: list[_Response], logits: torch.Tensor) -> None:
        """Append a token to each of these responses, from its row of the logits."""
        sampling = responses[0].sampling
        if any(response.sampling is not sampling for response in responses):
            for kind in self.samplings.values():
                rows = [row for row, response in enumerate(responses) if response.sampling is kind]
                if rows:
                    self._choose([responses[row] for row in rows], logits[rows])
            return
        positions = np.array([len(response.completion.token_ids) for response in responses], dtype=np.uint64)
        streams = np.array([response.stream for response in responses], dtype=np.uint64)
        tokens, log_probs = choose_tokens(logits, uniforms(streams, positions).to(logits.device), sampling)
        ended = []
        for response, token, log_prob in zip(responses, tokens.tolist(), log_probs.tolist(), strict=True):
            completion = response.completion
            completion.token_ids.append(token)
            completion.log_probs.append(log_prob)
            completion.finished_by_eos = token in response.eos
            if completion.finished_by_eos or len(completion.token_ids) == sampling.max_tokens:
                ended.append(response)
        for response in ended:
            response.is_over = True
            self.responses.pop(response.request.id)
            self.engine.finish(response.request.id, response.completion)
        self.progress.add(tokens=len(responses), responses=len(ended))


def _by_context(responses: list[_Response]) -> list[tuple[tuple[int, ...], list[_Response]]]:
    """Those together whose prompts and sampled tokens are equal.

    Similar lengths together, so that little padding is computed, the longest last.
    """
    sharing: dict[tuple[int, ...], list[_Response]] = {}
    for response in responses:
        sharing.setdefault((*response.request.prompt_ids, *response.completion.token_ids), []).append(response)
    return sorted(sharing.items(), key=lambda item: len(item[0]))


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
    """Logs the progress of the requests under way every PROGRESS_SECONDS."""

    def __init__(self) -> None:
        self.total = self.done = self.tokens = 0
        self.start = self.last_line = time.monotonic()

    def add(self, *, tokens: int, responses: int) -> None:
        self.tokens += tokens
        self.done += responses
        now = time.monotonic()
        if now - self.last_line >= PROGRESS_SECONDS:
            self.last_line = now
            rate = self.tokens / (now - self.start)
            logger.info("rollout: %d of %d responses done, %s tokens/s", self.done, self.total, f"{rate:,.0f}")
