"""What the embedded engine does beyond the contract: which work it saves, and how it leaves a shared model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Cache,
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
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import Completion, Request, RequestId, SamplingParams
from paceline.rollout.token_choice import choose_tokens, random_streams, uniforms

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
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=None)),
    "llama with everything": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
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


@dataclass
class Pass:
    """One forward pass."""

    rows: int
    tokens: int
    """Without padding."""
    columns: int
    """That a row attends to, padding included."""
    is_prefill: bool


@contextmanager
def watched() -> Iterator[list[Pass]]:
    """Filled with every forward pass inside."""
    passes: list[Pass] = []
    forward = native._Generation._forward

    def noting(generation: Any, input_ids: list[list[int]], padding: list[int], cache: Cache) -> torch.Tensor:
        rows, new = len(input_ids), len(input_ids[0])
        columns = cache.get_mask_sizes(new, 0)[0]
        tokens = rows if new == 1 else rows * new - sum(padding)
        passes.append(Pass(rows, tokens, columns, is_prefill=columns == new))
        return forward(generation, input_ids, padding, cache)

    with mock.patch.object(native._Generation, "_forward", noting):
        yield passes


@pytest.mark.parametrize("max_num_seqs", [2, 256])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers_for_every_architecture(name: str, max_num_seqs: int) -> None:
    model, prompts = make_model(name), prompts_of(3, 12, 1, 20, 7)
    eos = {1, 30, 31, 32, 33}
    rollout = NativeRollout(model, eos, 0, max_num_seqs)
    found = rollout.generate(prompts, SamplingParams(24, do_sample=False), [0] * 5)
    assert len({len(completion.token_ids) for completion in found}) > 1
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=sorted(eos)
        )
        assert completion.token_ids == wanted[0, len(prompt) :].tolist()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    copies=st.integers(1, 3),
    max_num_seqs=st.integers(1, 8),
    prefill_tokens=st.sampled_from([1, 50, 2048]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_company_order_and_refills_change_no_response(lengths, copies, max_num_seqs, prefill_tokens, order) -> None:
    """And nothing is computed twice, or for a response that has ended."""
    prompts = [prompt for prompt in prompts_of(*lengths) for _ in range(copies)]
    requests = list(zip(prompts, range(len(prompts)), strict=True))
    sampling, eos, model = SamplingParams(20, top_p=0.95), set(range(6)), make_model()
    alone = [NativeRollout(model, eos, 0).generate([prompt], sampling, [seed])[0] for prompt, seed in requests]

    numbers = list(range(len(requests)))
    order.shuffle(numbers)
    with mock.patch.object(native, "PREFILL_TOKENS", prefill_tokens), watched() as passes:
        found = NativeRollout(model, eos, 0, max_num_seqs).generate(
            [requests[number][0] for number in numbers], sampling, [requests[number][1] for number in numbers]
        )
    for number, completion in zip(numbers, found, strict=True):
        assert completion.token_ids == alone[number].token_ids
        assert completion.finished_by_eos == alone[number].finished_by_eos
        assert completion.log_probs == pytest.approx(alone[number].log_probs, abs=1e-5)

    # The first token of a response comes with its prompt, each other from a row of its own.
    assert sum(a_pass.tokens for a_pass in passes if a_pass.is_prefill) == sum(map(len, {*map(tuple, prompts)}))
    row_steps = sum(a_pass.rows for a_pass in passes if not a_pass.is_prefill)
    assert row_steps == sum(len(completion.token_ids) - 1 for completion in found)
    assert max(a_pass.rows for a_pass in passes) <= max_num_seqs


def test_the_same_call_gives_the_same_bits() -> None:
    rollout, prompts = NativeRollout(make_model(), set(range(6)), 0, max_num_seqs=5), prompts_of(*range(1, 24))
    first = rollout.generate(prompts, SamplingParams(30), list(range(23)))
    assert rollout.generate(prompts, SamplingParams(30), list(range(23))) == first


def test_free_rows_go_to_the_next_requests_at_once() -> None:
    rollout = NativeRollout(make_model(), set(range(8)), 0, max_num_seqs=4)
    with watched() as passes:
        found = rollout.generate(prompts_of(*[5] * 30), SamplingParams(25), list(range(30)))
    lengths = [len(completion.token_ids) for completion in found]
    assert min(lengths) < 4 < 15 < max(lengths)
    steps = [a_pass.rows for a_pass in passes if not a_pass.is_prefill]
    full = steps.count(4)
    assert steps == [4] * full + sorted(steps[full:], reverse=True)
    assert len(steps) - full <= max(lengths)


def test_a_long_response_among_short_ones() -> None:
    """Columns of rows that came and went are neither kept nor looked at."""
    model, [prompt, *others] = make_model(), prompts_of(3, *[2] * 60)
    eos, sampling = {*range(2, 40)}, SamplingParams(120)
    alone = NativeRollout(model, eos, 0, 2000).generate([prompt] * 2000, sampling, list(range(2000)))
    seed = max(range(2000), key=lambda seed: len(alone[seed].token_ids))
    with watched() as passes:
        found = NativeRollout(model, eos, 0, max_num_seqs=2).generate([prompt, *others], sampling, [seed, *range(60)])
    assert found[0].token_ids == alone[seed].token_ids
    assert found[0].log_probs == pytest.approx(alone[seed].log_probs, abs=1e-5)
    longest = max(2 + len(completion.token_ids) for completion in found)
    assert max(a_pass.columns for a_pass in passes) <= longest
    assert len(passes) > 2 * longest


def test_equal_prompts_are_computed_once_also_when_they_do_not_fit_together() -> None:
    model, [first, second] = make_model(), prompts_of(9, 4)
    prompts = [first, first, second, first, first]
    with watched() as passes:
        NativeRollout(model, {1}, 0, max_num_seqs=2).generate(prompts, SamplingParams(3, ignore_eos=True), [0] * 5)
    assert [(a_pass.rows, a_pass.tokens) for a_pass in passes if a_pass.is_prefill] == [(2, 13)]


def test_prefill_is_split_by_tokens_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make_model(), prompts_of(9, 4, 5, 2, 9)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 20)
    with watched() as passes:
        NativeRollout(model, {1}, 0).generate(prompts, SamplingParams(1), list(range(5)))
    assert [(a_pass.rows, a_pass.tokens) for a_pass in passes] == [(2, 18), (3, 11)]


@pytest.mark.parametrize("trains", [True, False])
def test_bfloat16_is_computed_under_one_autocast_and_changes_no_weight(trains: bool) -> None:
    model = make_model().requires_grad_(trains)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[torch.Tensor] = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    prompts, sampling = prompts_of(5, 3, 9), SamplingParams(8, do_sample=False)
    [exact, *_] = NativeRollout(model, {1}, 0).generate(prompts, sampling, [0] * 3)
    with mock.patch.object(torch, "autocast", wraps=torch.autocast) as autocast:
        [found, *_] = NativeRollout(model, {1}, 0, dtype=torch.bfloat16).generate(prompts, sampling, [0] * 3)
    assert autocast.call_count == 1
    assert {output.dtype for output in seen} == {torch.float32, torch.bfloat16}
    assert found.log_probs[0] != exact.log_probs[0]
    assert found.log_probs[0] == pytest.approx(exact.log_probs[0], abs=0.05)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {parameter.requires_grad for parameter in model.parameters()} == {trains}
    assert not torch.is_autocast_enabled("cpu")


BOTH_PASSES = pytest.mark.parametrize("name", ["qwen2", "mistral, window 8"])
"""The engine's own forward pass, and the model's."""


@BOTH_PASSES
def test_shared_model_is_left_as_it_was_found_and_can_train_on(name: str) -> None:
    model = make_model(name).train()
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


@BOTH_PASSES
def test_failure_while_decoding_leaves_the_model_as_it_was(name: str) -> None:
    model = make_model(name).train()
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


@BOTH_PASSES
def test_dropout_has_no_part_in_sampling(name: str) -> None:
    model = ARCHITECTURES[name]()
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


# Requests one by one


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 5), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("update"), st.none(), st.none()),
        st.tuples(st.just("collect"), st.none(), st.none()),
    ),
    max_size=25,
)


@torch.no_grad()
def sampled_slowly(models: list[Any], request: Request, found: Completion) -> tuple[list[int], list[float]]:
    """Each token from a pass of its own over all before it, by the weights of the version that sampled it."""
    tokens, log_probs = [], []
    for place, version in enumerate(found.versions):
        logits = models[version % 2](torch.tensor([request.prompt_ids + found.token_ids[:place]])).logits[:, -1]
        uniform = uniforms(random_streams([request.seed]), np.array([place], dtype=np.uint64))
        token, log_prob = choose_tokens(logits, uniform, request.sampling)
        tokens.append(token.item())
        log_probs.append(log_prob.item())
    return tokens, log_probs


@given(operations=OPERATIONS, max_num_seqs=st.integers(1, 5), prefill_tokens=st.sampled_from([30, 2048]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_order_of_submits_steps_aborts_and_updates(operations, max_num_seqs, prefill_tokens) -> None:
    """Every token is what its own seed and the weights of its version make of all tokens before it."""
    models = [make_model(), make_model()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(-1)
    engine = NativeRollout(make_model(), {1, 2, 3}, 0, max_num_seqs)
    requests: dict[RequestId, Request] = {}
    collected: dict[RequestId, Completion] = {}
    dropped: set[RequestId] = set()
    with mock.patch.object(native, "PREFILL_TOKENS", prefill_tokens):
        for name, number, other in [*operations, ("step", 200, None)]:
            if name == "submit":
                [prompt] = prompts_of(number)
                new = [
                    Request(len(requests) + copy, prompt, SamplingParams(4 * other, top_p=0.9), seed=number + copy)
                    for copy in range(other)
                ]
                engine.submit(new)
                requests |= {request.id: request for request in new}
            elif name == "step":
                for _ in range(number):
                    engine.step()
                    assert len(engine._generation.rows if engine._generation else []) <= max_num_seqs
            elif name == "update":
                engine.update_weights(models[(engine.version + 1) % 2].state_dict().items())
            elif name == "collect":
                collected |= dict(engine.collect())
            elif number in engine._under_way:
                [(_, sampled)] = engine.abort([number])
                if other:
                    engine.submit([replace(requests[number], sampled=sampled)])
                else:
                    dropped.add(number)
                    collected[number] = sampled
    collected |= dict(engine.collect())
    assert not engine.has_work
    assert engine._generation is None
    assert collected.keys() == requests.keys()
    for number, found in collected.items():
        tokens, log_probs = sampled_slowly(models, requests[number], found)
        assert found.token_ids == tokens
        assert found.log_probs == pytest.approx(log_probs, abs=1e-5)
        limit = requests[number].sampling.max_tokens
        is_whole = found.finished_by_eos or len(found.token_ids) == limit
        assert is_whole or number in dropped
        assert {1, 2, 3}.isdisjoint(found.token_ids[:-1])


def test_later_requests_do_not_overtake_those_that_wait() -> None:
    engine = NativeRollout(make_model(), set(), 0, max_num_seqs=1)
    short, *longer = prompts_of(1, *range(20, 30))
    engine.submit([Request("first", longer[0], SamplingParams(3), 0), Request("short", short, SamplingParams(3), 0)])
    order: list[RequestId] = []
    for number, prompt in enumerate(longer[1:]):
        engine.step()
        engine.submit([Request(number, prompt, SamplingParams(3), 0)])
        order += [name for name, _ in engine.collect()]
    assert order[:2] == ["first", "short"]


def test_a_failed_step_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = NativeRollout(make_model(), set(), 0, max_num_seqs=2), prompts_of(5, 3, 9)
    wanted = engine.generate(prompts, SamplingParams(8), [0, 1, 2])
    engine.submit([Request(number, prompt, SamplingParams(8), number) for number, prompt in enumerate(prompts)])
    forward = native._Generation._forward
    for calls in range(1, 12):
        with monkeypatch.context() as patch:
            left = iter(range(calls % 3))

            def failing(generation: Any, *args: Any, left: Iterator[int] = left) -> torch.Tensor:
                if next(left, None) is None:
                    raise MemoryError
                return forward(generation, *args)

            patch.setattr(native._Generation, "_forward", failing)
            with suppress(MemoryError):
                engine.step()
        engine.step()
    found = dict(engine.collect())
    while engine.has_work:
        engine.step()
        found |= dict(engine.collect())
    assert [found[number].token_ids for number in range(3)] == [completion.token_ids for completion in wanted]
