"""The embedded rollout engine: KV-cached batched sampling in the worker, on a Hugging Face causal LM.

The model may be the actor's own module, then there are no weights to move, or a copy that `update_weights` fills.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from paceline.errors import DataError, NonFiniteError, PacelineError
from paceline.rollout.base import Completion, RolloutEngine, SamplingParams
from paceline.rollout.kv_cache import GROUPED_SDPA, BufferedCache
from paceline.rollout.registry import register_rollout
from paceline.rollout.sampling import choose_tokens, uniforms

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Prompt tokens (padding included) per forward pass: bounds the memory of activations."""
PROGRESS_SECONDS = 10.0
"""Pause between two progress lines of a long generation."""


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All tokens that end a response: the model's generation config may name several, the tokenizer one more."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(configured) if isinstance(configured, list | tuple) else {configured}
    return {token for token in ids | {tokenizer.eos_token_id} if token is not None}


@register_rollout("native")
class NativeRollout(RolloutEngine):
    """Samples from a causal LM whose layers are all attention with past_key_values (Qwen, Llama, Mistral, ...).

    Requests are decoded in batches of at most `max_num_seqs` rows, of similar prompt lengths. Equal prompts of a
    batch are computed once. Rows that have ended leave the computation. No cache outlives `generate`.
    """

    def __init__(
        self, model: PreTrainedModel, eos_token_ids: set[int], pad_token_id: int, max_num_seqs: int = 256
    ) -> None:
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_num_seqs = max_num_seqs

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in order. The model's mode and the global random state stay as they are."""
        if len(seeds) != len(prompts):
            raise PacelineError(
                f"generate got {len(prompts)} prompts and {len(seeds)} seeds; give one seed per prompt."
            )
        empty = [index for index, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise DataError(f"prompts {empty[:10]} have no tokens; a causal LM needs at least one token to start from.")
        # Similar lengths together, so that little padding is computed.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        completions: dict[int, Completion] = {}
        progress = _Progress(len(prompts))
        with torch.no_grad(), _decoding_mode(self.model):
            for start in range(0, len(order), self.max_num_seqs):
                batch = order[start : start + self.max_num_seqs]
                decoded = self._decode([prompts[i] for i in batch], sampling, [seeds[i] for i in batch], progress)
                completions.update(zip(batch, decoded, strict=True))
        return [completions[index] for index in range(len(prompts))]

    def _decode(
        self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int], progress: _Progress
    ) -> list[Completion]:
        """Decode one batch until every row has ended."""
        device = self.model.device
        eos = torch.tensor([] if sampling.ignore_eos else self.eos_token_ids, dtype=torch.long, device=device)
        uniform = uniforms(seeds, sampling.max_tokens).to(device)
        tokens = torch.full((len(prompts), sampling.max_tokens), -1, dtype=torch.long, device=device)
        log_probs = torch.zeros(tokens.shape, device=device)

        cache, logits = self._prefill(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        padding = lengths.max() - lengths  # left of each row in the cache
        position = lengths  # of each row's next token
        rows = torch.arange(len(prompts), device=device)  # which request a row of the cache belongs to
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        num_ended = 0

        for step in range(sampling.max_tokens):
            chosen, log_prob = choose_tokens(logits, uniform[rows, step], sampling)
            tokens[rows, step], log_probs[rows, step] = chosen, log_prob
            ended |= torch.isin(chosen, eos)
            num_before, num_ended = num_ended, int(ended.sum())
            progress.add(tokens=len(rows) - num_before, responses=num_ended - num_before)
            if num_ended == len(rows) or step == sampling.max_tokens - 1:
                break
            if num_ended * 8 >= len(rows):
                # Ended rows are computed along until there are enough of them to pay for copying the others.
                going_on = (~ended).nonzero().squeeze(-1)
                rows, position, padding, chosen = (x[going_on] for x in (rows, position, padding, chosen))
                crop = int(padding.min())
                padding = padding - crop
                cache.select(going_on, crop)
                ended, num_ended = ended[going_on], 0
            columns = torch.arange(cache.get_seq_length() + 1, device=device)
            logits = self._forward(chosen[:, None], columns >= padding[:, None], position[:, None], cache)
            position = position + 1
        progress.add(tokens=0, responses=len(rows) - num_ended)
        if not torch.isfinite(log_probs).all():
            raise NonFiniteError(
                "sampling met logits that are not finite: the model's weights hold NaN or infinity, or overflow in "
                f"{self.model.dtype}. Look at actor/grad_norm of the steps before; lower the learning rate."
            )
        return _completions(tokens, log_probs, eos)

    def _prefill(self, prompts: list[list[int]]) -> tuple[BufferedCache, torch.Tensor]:
        """Run the prompts, equal ones once; gives the cache of all and the logits (rows, vocabulary) at their ends."""
        device = self.model.device
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(tuple(prompt), []).append(row)
        unique = sorted(rows_of, key=len)
        cache = BufferedCache(len(prompts), len(unique[-1]))
        logits: torch.Tensor | None = None
        while unique:
            # As many of the longest prompts that remain as fit into one pass.
            count = max(1, PREFILL_TOKENS // len(unique[-1]))
            unique, part = unique[:-count], unique[-count:]
            input_ids, attention_mask = self._left_pad(part)
            position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
            prefilled = DynamicCache()
            last = self._forward(input_ids, attention_mask, position_ids, prefilled)
            rows = torch.tensor([row for prompt in part for row in rows_of[prompt]], device=device)
            copies = torch.tensor([len(rows_of[prompt]) for prompt in part], device=device)
            sources = torch.arange(len(part), device=device).repeat_interleave(copies)
            cache.put(rows, prefilled, sources)
            if logits is None:
                logits = last.new_empty(len(prompts), last.shape[-1])
            logits[rows] = last[sources]
        assert logits is not None  # there is at least one prompt
        return cache, logits

    def _left_pad(self, prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        attention_mask = torch.arange(width) >= width - lengths[:, None]
        return input_ids.to(self.model.device), attention_mask.to(self.model.device)

    def _forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Logits (rows, vocabulary) after the last position; `cache` is extended."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into the model in place. For tied weights, such as an output layer, either name will do.

        Not needed, and not to be called, when the model is the actor's own module. After an error the model holds a mix
        of old and new weights.
        """
        state = self.model.state_dict()
        filled: set[int] = set()
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in state:
                    raise PacelineError(f"update_weights got {name!r}, which the rollout's model does not have.")
                if state[name].shape != tensor.shape:
                    raise PacelineError(
                        f"update_weights got {name!r} of shape {tuple(tensor.shape)}; "
                        f"the rollout's model has {tuple(state[name].shape)}."
                    )
                state[name].copy_(tensor)
                filled.add(state[name].data_ptr())
        missing = [name for name, tensor in state.items() if tensor.data_ptr() not in filled]
        if missing:
            raise PacelineError(
                f"update_weights got no value for {len(missing)} of {len(state)} weights: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}. Send the whole state dict of the actor."
            )

    def sleep(self) -> None:
        """No cache outlives `generate`: there is nothing to free but what the device's allocator holds back."""
        if self.model.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """Always awake."""


@contextmanager
def _decoding_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and the decoding attention inside; afterwards every submodule's mode as it was found.

    In training mode dropout would be on, and gradient checkpointing would switch the cache off.
    """
    training = [module for module in model.modules() if module.training]
    attention = model.config._attn_implementation
    model.eval()
    if attention == "sdpa":
        model.config._attn_implementation = GROUPED_SDPA
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        for module in training:
            module.training = True


def _completions(tokens: torch.Tensor, log_probs: torch.Tensor, eos: torch.Tensor) -> list[Completion]:
    """Cut each row of (rows, max_tokens) after its first EOS: it may have been computed along beyond that."""
    is_eos = torch.isin(tokens, eos)
    num_eos_before = is_eos.cumsum(dim=1) - is_eos.long()
    lengths = ((num_eos_before == 0) & (tokens >= 0)).sum(dim=1)
    return [
        Completion(row_tokens[:length], row_log_probs[:length], finished)
        for row_tokens, row_log_probs, length, finished in zip(
            tokens.tolist(), log_probs.tolist(), lengths.tolist(), is_eos.any(dim=1).tolist(), strict=True
        )
    ]


@dataclass
class _Progress:
    """Says every PROGRESS_SECONDS how far a generation is."""

    total: int

    def __post_init__(self) -> None:
        self.responses = self.tokens = 0
        self.start = self.last_line = time.monotonic()

    def add(self, *, tokens: int, responses: int) -> None:
        self.tokens += tokens
        self.responses += responses
        now = time.monotonic()
        if now - self.last_line >= PROGRESS_SECONDS:
            self.last_line = now
            rate = self.tokens / (now - self.start)
            logger.info("rollout: %d of %d responses done, %s tokens/s", self.responses, self.total, f"{rate:,.0f}")
