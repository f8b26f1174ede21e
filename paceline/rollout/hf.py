"""`transformers.generate` behind the rollout interface: the simple engine to compare the others with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from paceline.protocol.image_columns import ImageInputs
from paceline.rollout.batch_rollout import BatchRollout
from paceline.rollout.model_rollout import ModelRollout
from paceline.rollout.rollout_interface import Completion, Request, SamplingParams, register_rollout
from paceline.rollout.token_choice import choose_tokens, random_streams, uniforms


@register_rollout("hf")
class HfRollout(BatchRollout, ModelRollout):
    """Works with every causal LM that transformers can generate from.

    Requests go in batches of `max_num_seqs` rows, each computed until its last row has ended. The same seed gives the
    same tokens as the native engine.
    """

    takes_images = True

    def sample(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        return self._sample(prompts, sampling, seeds, [])

    def sample_requests(self, requests: list[Request], sampling: SamplingParams) -> list[Completion]:
        images = [request.images for request in requests if request.images is not None]
        return self._sample(
            [request.prompt_ids for request in requests], sampling, [request.seed for request in requests], images
        )

    def _sample(
        self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int], images: list[ImageInputs]
    ) -> list[Completion]:
        completions: list[Completion] = []
        with _without_generation_defaults(self.model):
            for start in range(0, len(prompts), self.max_num_seqs):
                batch = slice(start, start + self.max_num_seqs)
                completions += self._sample_batch(prompts[batch], sampling, seeds[batch], images[batch])
        return completions

    def _sample_batch(
        self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int], images: list[ImageInputs]
    ) -> list[Completion]:
        width, device = max(len(prompt) for prompt in prompts), self.model.device
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        eos = [] if sampling.ignore_eos else self.eos_token_ids
        model: Any = self.model
        image_token = model.config.image_token_id if images else None
        choice = _SeededChoice(sampling, seeds, never=image_token)
        more = {}
        if images:
            pixels, grids = ImageInputs.joined(images)
            more = {"pixel_values": pixels.to(device), "image_grid_thw": grids.to(device)}
            more["mm_token_type_ids"] = input_ids.eq(int(model.config.image_token_id)).int().to(device)
        responses = model.generate(
            input_ids.to(device),
            attention_mask=(torch.arange(width) >= width - lengths[:, None]).long().to(device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=eos or None,
                pad_token_id=self.pad_token_id,
            ),
            logits_processor=LogitsProcessorList([choice]),
            **more,
        )[:, width:].tolist()
        log_probs = torch.stack(choice.log_probs, dim=1).tolist()
        completions = []
        for tokens, row_log_probs in zip(responses, log_probs, strict=True):
            end = next((place for place, token in enumerate(tokens) if token in eos), None)
            length = len(tokens) if end is None else end + 1
            completions.append(Completion(tokens[:length], row_log_probs[:length], end is not None))
        return completions


class _SeededChoice(LogitsProcessor):
    """Leaves one token per row, chosen by the row's own random numbers, for greedy decoding to take.

    `generate` itself samples all rows from one global random state: a row would depend on its neighbours.
    """

    def __init__(self, sampling: SamplingParams, seeds: list[int], never: int | None = None) -> None:
        self.sampling, self.streams = sampling, random_streams(seeds)
        self.never = never
        """A token that is not chosen: that of images, which means something with an image alone."""
        self.log_probs: list[torch.Tensor] = []
        """Of the chosen tokens, (rows,) per step."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        position = np.array([len(self.log_probs)], dtype=np.uint64)
        uniform = uniforms(self.streams, position).to(scores.device)
        chosen, log_probs = choose_tokens(scores, uniform, self.sampling)
        if self.never is not None and bool((chosen == self.never).any()):
            others = scores.index_fill(-1, torch.tensor([self.never], device=scores.device), -torch.inf)
            again = choose_tokens(others, uniform, self.sampling)[0]
            temperature = self.sampling.temperature if self.sampling.do_sample else 1.0
            its_log_probs = (scores.float() / temperature).log_softmax(-1).gather(-1, again[:, None])[:, 0]
            log_probs = torch.where(chosen == self.never, its_log_probs, log_probs)
            chosen = torch.where(chosen == self.never, again, chosen)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)


@contextmanager
def _without_generation_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Switch off the model's own generation settings, such as a repetition penalty."""
    defaults = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
