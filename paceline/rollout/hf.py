"""`transformers.generate` behind the rollout interface: the simple engine to compare the others with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from paceline.rollout.base import Completion, RolloutEngine, SamplingParams, check_finite, check_requests
from paceline.rollout.registry import register_rollout
from paceline.rollout.sampling import choose_tokens, uniforms
from paceline.rollout.weights import whole_state


@register_rollout("hf")
class HfRollout(RolloutEngine):
    """Works with every causal LM that transformers can generate from.

    Requests go in batches of `max_num_seqs` rows, each computed until its last row has ended. The same seed gives the
    same tokens as the native engine.
    """

    def __init__(
        self, model: PreTrainedModel, eos_token_ids: set[int], pad_token_id: int, max_num_seqs: int = 256
    ) -> None:
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_num_seqs = max_num_seqs

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in order."""
        check_requests(prompts, seeds)
        completions: list[Completion] = []
        with _as_found(self.model):
            for start in range(0, len(prompts), self.max_num_seqs):
                batch = slice(start, start + self.max_num_seqs)
                completions += self._generate_batch(prompts[batch], sampling, seeds[batch])
        check_finite(completions)
        return completions

    def _generate_batch(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        width, device = max(len(prompt) for prompt in prompts), self.model.device
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        eos = [] if sampling.ignore_eos else self.eos_token_ids
        choice = _SeededChoice(sampling, uniforms(seeds, sampling.max_tokens).to(device))
        responses = self.model.generate(
            input_ids.to(device),
            attention_mask=(torch.arange(width) >= width - lengths[:, None]).long().to(device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=eos or None,
                pad_token_id=self.pad_token_id,
            ),
            logits_processor=LogitsProcessorList([choice]),
        )[:, width:].tolist()
        log_probs = torch.stack(choice.log_probs, dim=1).tolist()
        completions = []
        for tokens, row_log_probs in zip(responses, log_probs, strict=True):
            end = next((place for place, token in enumerate(tokens) if token in eos), None)
            length = len(tokens) if end is None else end + 1
            completions.append(Completion(tokens[:length], row_log_probs[:length], end is not None))
        return completions

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into the model in place. Not to be called when the model is the actor's own module."""
        state = self.model.state_dict()
        for name, tensor in whole_state(self.model, named_tensors):
            state[name].copy_(tensor)

    def sleep(self) -> None:
        """No cache outlives `generate`: there is nothing to free but what the device's allocator holds back."""
        if self.model.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """Always awake."""


class _SeededChoice(LogitsProcessor):
    """Leaves one token per row, chosen by the row's own random numbers, for greedy decoding to take.

    `generate` itself samples all rows from one global random state: a row would depend on its neighbours.
    """

    def __init__(self, sampling: SamplingParams, uniform: torch.Tensor) -> None:
        self.sampling, self.uniform = sampling, uniform  # uniform (rows, max_tokens)
        self.log_probs: list[torch.Tensor] = []
        """Of the chosen tokens, (rows,) per step."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        chosen, log_probs = choose_tokens(scores, self.uniform[:, len(self.log_probs)], self.sampling)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)


@contextmanager
def _as_found(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside, without the model's own generation defaults, such as a repetition penalty."""
    training = [module for module in model.modules() if module.training]
    defaults = model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
        for module in training:
            module.training = True
