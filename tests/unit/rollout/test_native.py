"""What the embedded engine does beyond the contract: which work it saves, and how it leaves a shared model."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.errors import NonFiniteError
from paceline.rollout import native
from paceline.rollout.base import SamplingParams
from paceline.rollout.native import NativeRollout, eos_token_ids
from tests.tiny import make_tiny_tokenizer

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral, window 8": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=8)),
    "qwen2, window 8 in one layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ),
    "qwen2, eager": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation="eager")),
}


def make_model(name: str = "qwen2") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ARCHITECTURES[name]().eval()


def prompts_of(*lengths: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (length,), generator=dice).tolist() for length in lengths]


def batch_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Filled with (rows, positions) of every forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers_for_every_architecture(name: str) -> None:
    model, prompts = make_model(name), prompts_of(3, 12, 1, 20, 7)
    eos = {1, 30, 31, 32, 33}
    found = NativeRollout(model, eos, 0).generate(prompts, SamplingParams(24, do_sample=False), [0] * 5)
    assert len({len(completion.token_ids) for completion in found}) > 1
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=sorted(eos)
        )
        assert completion.token_ids == wanted[0, len(prompt) :].tolist()


def test_equal_prompts_are_computed_once() -> None:
    model = make_model()
    shapes = batch_shapes(model)
    first, second = prompts_of(9, 4)
    NativeRollout(model, {1}, 0).generate([first, first, second, first], SamplingParams(2, ignore_eos=True), [0] * 4)
    assert shapes == [(2, 9), (4, 1)]


def test_prefill_is_split_by_tokens_without_changing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make_model(), prompts_of(9, 4, 5, 2, 9)
    rollout, sampling = NativeRollout(model, {1}, 0), SamplingParams(10)
    whole = rollout.generate(prompts, sampling, list(range(5)))
    monkeypatch.setattr(native, "PREFILL_TOKENS", 20)
    shapes = batch_shapes(model)
    parts = rollout.generate(prompts, sampling, list(range(5)))
    assert shapes[:2] == [(2, 9), (3, 5)]
    assert [completion.token_ids for completion in parts] == [completion.token_ids for completion in whole]


def test_ended_rows_leave_the_computation() -> None:
    model = make_model()
    shapes = batch_shapes(model)
    prompts = prompts_of(*range(2, 34))
    completions = NativeRollout(model, set(range(8)), 0).generate(prompts, SamplingParams(30), list(range(32)))
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths) < 5 < 20 < max(lengths)
    for step, (rows, _) in enumerate(shapes[1:], 1):
        going_on = sum(length > step for length in lengths)
        assert going_on <= rows < going_on / (1 - 1 / 8) + 1
    assert len(shapes) == max(lengths)


def test_requests_beyond_max_num_seqs_are_batched_by_length() -> None:
    model = make_model()
    shapes = batch_shapes(model)
    NativeRollout(model, {1}, 0, max_num_seqs=2).generate(prompts_of(9, 3, 8, 2, 5), SamplingParams(1), list(range(5)))
    assert shapes == [(2, 3), (2, 8), (1, 9)]


def test_shared_model_is_left_as_it_was_found_and_can_train_on() -> None:
    model = make_model().train()
    model.gradient_checkpointing_enable()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    frozen = model.model.norm.weight.requires_grad_(False)
    NativeRollout(model, {1}, 0).generate(prompts_of(5, 3), SamplingParams(4), [0, 1])
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert not frozen.requires_grad
    ids = torch.tensor(prompts_of(6))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter is not frozen)


def test_failure_while_decoding_leaves_the_model_as_it_was() -> None:
    model = make_model().train()
    with pytest.raises(IndexError):
        NativeRollout(model, {1}, 0).generate([[5, 10_000]], SamplingParams(4), [0])
    assert model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_weights_are_an_error_and_no_response(bad: float, do_sample: bool) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = bad
    with pytest.raises(NonFiniteError, match="not finite"):
        NativeRollout(model, {1}, 0).generate(prompts_of(5, 3), SamplingParams(4, do_sample=do_sample), [0, 1])


def test_dropout_has_no_part_in_sampling() -> None:
    model = ARCHITECTURES["llama"]()
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    rollout = NativeRollout(model.train(), {1}, 0)
    first = rollout.generate(prompts_of(5, 3), SamplingParams(8), [0, 1])
    assert rollout.generate(prompts_of(5, 3), SamplingParams(8), [0, 1]) == first


def test_progress_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger=native.__name__):
        NativeRollout(make_model(), set(range(8)), 0, max_num_seqs=4).generate(
            prompts_of(*range(2, 9)), SamplingParams(6), list(range(7))
        )
    done = [int(message.split()[1]) for message in caplog.messages]
    assert done == sorted(done)
    assert done[0] < done[-1] == 7
    assert caplog.messages[-1].startswith("rollout: 7 of 7 responses done, ")
    assert caplog.messages[-1].endswith(" tokens/s")


def test_short_generations_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=native.__name__):
        NativeRollout(make_model(), {1}, 0).generate(prompts_of(3), SamplingParams(4), [0])
    assert caplog.messages == []


@pytest.mark.parametrize(("configured", "expected"), [(None, {1}), (7, {1, 7}), ([7, 8], {1, 7, 8})])
def test_eos_tokens_come_from_generation_config_and_tokenizer(configured, expected: set[int]) -> None:
    model = make_model()
    model.generation_config = GenerationConfig(eos_token_id=configured)
    assert eos_token_ids(model, make_tiny_tokenizer()) == expected
