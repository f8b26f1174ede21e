"""What every rollout engine must do. An engine joins by an entry in ENGINES of `rollout_engines.py`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import DataError, NonFiniteError, PacelineError
from paceline.rollout.rollout_interface import (
    RolloutEngine,
    SamplingParams,
)
from paceline.workers.weight_channel import WeightChannel
from tests.contract.rollout_engines import (
    EOS,
    HIDDEN,
    TOLERANCE,
    Builder,
    build,
    build_hf,
    build_native,
    engine,
    folder,
    random_prompts,
    recomputed_log_probs,
    reference,
    save_peaked_model,
    tokens_of,
    transformers_greedy,
    vllm_is_gone_afterwards,
)
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.device

__all__ = ["build", "engine", "folder", "reference", "vllm_is_gone_afterwards"]
"""Fixtures of both files."""


@torch.no_grad()
def next_token_probs(model: PreTrainedModel, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, dim=-1)


def first_token_counts(engine: RolloutEngine, prompt: list[int], sampling: SamplingParams, count: int) -> torch.Tensor:
    completions = engine.generate([prompt] * count, sampling, list(range(count)))
    return torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=100)


def assert_frequencies_match(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square over the tokens expected at least 5 times, the rest in one bin; 4 sigma."""
    expected = torch.zeros(len(counts), dtype=torch.float64)
    expected[: len(probs)] = probs * counts.sum()
    common = expected >= 5
    bins = torch.cat([expected[common], expected[~common].sum()[None]])
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    assert seen[bins == 0].sum() == 0
    seen, bins = seen[bins > 0], bins[bins > 0]
    chi_square = ((seen - bins) ** 2 / bins).sum()
    freedom = len(bins) - 1
    assert freedom >= 3
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


# Greedy decoding and log-probs


@pytest.mark.parametrize("eos", [[EOS], [EOS, 5, 40, 77]])
def test_greedy_output_equals_transformers_generate(build: Builder, folder: Path, reference, eos) -> None:
    prompts = random_prompts(12)
    completions = build(folder, set(eos)).generate(prompts, SamplingParams(24, do_sample=False), [0] * 12)
    assert tokens_of(completions) == [transformers_greedy(reference, prompt, 24, eos) for prompt in prompts]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(24),
        SamplingParams(24, temperature=0.6),
        SamplingParams(24, temperature=1.5, top_k=10),
        SamplingParams(24, temperature=1.2, top_p=0.8),
        SamplingParams(24, temperature=0.3, do_sample=False),
    ],
)
def test_log_probs_equal_a_recomputation_over_the_full_vocabulary(build, folder, reference, sampling) -> None:
    prompts = random_prompts(12)
    temperature = sampling.temperature if sampling.do_sample else 1.0
    completions = build(folder, {EOS, 5, 40, 77}).generate(prompts, sampling, list(range(12)))
    assert sum(completion.finished_by_eos for completion in completions) > 2
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = recomputed_log_probs(reference, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("do_sample", [True, False])
def test_broken_weights_are_an_error_and_no_response(build: Builder, tmp_path: Path, do_sample: bool) -> None:
    broken = save_peaked_model(tmp_path / "broken", seed=0)
    model = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(broken)
    with pytest.raises(NonFiniteError, match="not finite"):
        build(broken).generate([[5, 6, 7], [8]], SamplingParams(4, do_sample=do_sample), [0, 1])


# Seeds


def test_same_seed_gives_same_tokens_in_any_order_and_company(build: Builder, folder: Path, engine) -> None:
    prompts, seeds = random_prompts(10), [100 + index for index in range(10)]
    sampling = SamplingParams(20, top_p=0.95)
    together = tokens_of(engine.generate(prompts, sampling, seeds))
    alone = [
        engine.generate([prompt], sampling, [seed])[0].token_ids for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    backwards = tokens_of(engine.generate(prompts[::-1], sampling, seeds[::-1]))[::-1]
    small_batches = tokens_of(build(folder, max_num_seqs=3).generate(prompts, sampling, seeds))
    assert together == alone == backwards == small_batches


def test_different_seeds_give_different_samples_of_one_prompt(engine: RolloutEngine) -> None:
    samples = tokens_of(engine.generate([[5, 6, 7]] * 16, SamplingParams(16), list(range(16))))
    assert len({tuple(sample) for sample in samples}) == 16


def test_hf_and_native_draw_the_same_tokens_from_the_same_seeds(folder: Path) -> None:
    prompts, seeds, sampling = random_prompts(12), list(range(12)), SamplingParams(20, temperature=1.3, top_p=0.9)
    found = [tokens_of(build(folder).generate(prompts, sampling, seeds)) for build in (build_native, build_hf)]
    assert found[0] == found[1]


def test_n_samples_of_several_prompts_are_those_of_single_requests(engine: RolloutEngine) -> None:
    first, second = [9, 8, 7, 6], [50, 51]
    sampling = SamplingParams(12)
    repeated = engine.generate([first, first, second, second, first], sampling, [1, 2, 3, 4, 5])
    requests = [(first, 1), (first, 2), (second, 3), (second, 4), (first, 5)]
    single = [engine.generate([prompt], sampling, [seed])[0] for prompt, seed in requests]
    assert tokens_of(repeated) == tokens_of(single)


def test_global_random_state_is_neither_read_nor_changed(engine: RolloutEngine) -> None:
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    torch.manual_seed(1)
    before = state()
    first = engine.generate([[5, 6, 7]] * 4, SamplingParams(8), [1, 2, 3, 4])
    assert state() == before
    torch.manual_seed(2)
    assert tokens_of(engine.generate([[5, 6, 7]] * 4, SamplingParams(8), [1, 2, 3, 4])) == tokens_of(first)


# End of sequence and length


def test_response_ends_with_its_first_eos_or_at_the_limit(build: Builder, folder: Path) -> None:
    eos = {EOS, 5, 40, 77}
    completions = build(folder, eos).generate(random_prompts(60), SamplingParams(24), list(range(60)))
    for completion in completions:
        assert len(completion.log_probs) == len(completion.token_ids)
        assert eos.isdisjoint(completion.token_ids[:-1])
        if completion.finished_by_eos:
            assert completion.token_ids[-1] in eos
        else:
            assert len(completion.token_ids) == 24
            assert completion.token_ids[-1] not in eos
    assert 5 < sum(completion.finished_by_eos for completion in completions) < 60


def test_ignore_eos_goes_on_to_the_limit_with_the_same_tokens(build: Builder, folder: Path) -> None:
    prompts, seeds = random_prompts(20), list(range(20))
    engine = build(folder, {EOS, 5, 40, 77})
    stopped = engine.generate(prompts, SamplingParams(16), seeds)
    unstopped = engine.generate(prompts, SamplingParams(16, ignore_eos=True), seeds)
    assert any(completion.finished_by_eos for completion in stopped)
    for short, long in zip(stopped, unstopped, strict=True):
        assert len(long.token_ids) == 16
        assert not long.finished_by_eos
        assert long.token_ids[: len(short.token_ids)] == short.token_ids


def test_response_may_be_nothing_but_eos(build: Builder, folder: Path, reference) -> None:
    prompt = [5, 6, 7]
    most_likely = int(next_token_probs(reference, prompt).argmax())
    completion = build(folder, {most_likely}).generate([prompt], SamplingParams(8, do_sample=False), [0])[0]
    assert completion.token_ids == [most_likely]
    assert completion.finished_by_eos


def test_eos_as_the_last_allowed_token_counts_as_finished(build: Builder, folder: Path) -> None:
    prompt, greedy = [5, 6, 7], SamplingParams(16, do_sample=False)
    tokens = build(folder, set()).generate([prompt], greedy, [0])[0].token_ids
    length = next(length for length in range(2, 17) if tokens[length - 1] not in tokens[: length - 1])
    limited = SamplingParams(length, do_sample=False)
    completion = build(folder, {tokens[length - 1]}).generate([prompt], limited, [0])[0]
    assert completion.token_ids == tokens[:length]
    assert completion.finished_by_eos


def test_one_token_from_a_prompt_of_one_token(engine: RolloutEngine, reference) -> None:
    completion = engine.generate([[42]], SamplingParams(1), [3])[0]
    assert len(completion.token_ids) == 1
    expected = recomputed_log_probs(reference, [42], completion.token_ids, 1.0)
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_no_prompts_give_no_completions(engine: RolloutEngine) -> None:
    assert engine.generate([], SamplingParams(8), []) == []


def test_prompt_without_tokens_is_named(engine: RolloutEngine) -> None:
    with pytest.raises(DataError, match=r"prompts \[1\] have no tokens"):
        engine.generate([[5], []], SamplingParams(8), [0, 1])


def test_one_seed_per_prompt_is_required(engine: RolloutEngine) -> None:
    with pytest.raises(PacelineError, match="2 prompts and 1 seeds"):
        engine.generate([[5], [6]], SamplingParams(8), [0])


# Distributions


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampled_frequencies_match_the_softmax(engine: RolloutEngine, reference, temperature) -> None:
    prompt = [5, 6, 7]
    counts = first_token_counts(engine, prompt, SamplingParams(1, temperature=temperature), 4000)
    assert_frequencies_match(counts, next_token_probs(reference, prompt, temperature))


def test_second_token_is_sampled_given_the_first(engine: RolloutEngine, reference) -> None:
    prompt = [5, 6, 7]
    completions = engine.generate([prompt] * 4000, SamplingParams(2, top_k=2, ignore_eos=True), list(range(4000)))
    first = int(next_token_probs(reference, prompt).argmax())
    seconds = [completion.token_ids[1] for completion in completions if completion.token_ids[0] == first]
    probs = next_token_probs(reference, [*prompt, first])
    likely = probs.topk(2).indices.tolist()
    share = float(probs[likely[0]] / probs[likely].sum())
    assert set(seconds) == set(likely)
    spread = (share * (1 - share) / len(seconds)) ** 0.5
    assert abs(seconds.count(likely[0]) / len(seconds) - share) < 4 * spread


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.7), (12, 0.8)])
def test_top_k_and_top_p_sample_exactly_their_support(engine: RolloutEngine, reference, top_k, top_p) -> None:
    prompt = [5, 6, 7]
    probs = next_token_probs(reference, prompt)
    order = probs.argsort(descending=True).tolist()[: top_k if top_k > 0 else None]
    total, support = float(probs[order].sum()), []
    while float(probs[support].sum()) < top_p * total and len(support) < len(order):
        support.append(order[len(support)])
    assert 4 < len(support) < 60
    restricted = torch.zeros_like(probs)
    restricted[support] = probs[support] / probs[support].sum()

    counts = first_token_counts(engine, prompt, SamplingParams(1, top_k=top_k, top_p=top_p), 4000)
    assert set(counts.nonzero().squeeze(-1).tolist()) == set(support)
    assert_frequencies_match(counts, restricted)


@pytest.mark.parametrize("narrow", [SamplingParams(12, top_k=1), SamplingParams(12, top_p=1e-6)])
def test_narrowest_sampling_is_greedy(engine: RolloutEngine, narrow: SamplingParams) -> None:
    prompts = random_prompts(6)
    greedy = engine.generate(prompts, SamplingParams(12, do_sample=False), [0] * 6)
    assert tokens_of(engine.generate(prompts, narrow, list(range(6)))) == tokens_of(greedy)


# Weights and memory


def test_updated_weights_are_the_ones_sampled_from(build: Builder, tmp_path: Path) -> None:
    other = save_peaked_model(tmp_path / "other", seed=1)
    prompts, sampling = random_prompts(6), SamplingParams(12)
    engine, fresh = build(save_peaked_model(tmp_path / "old", seed=0)), build(other)
    before = engine.generate(prompts, sampling, list(range(6)))
    engine.update_weights(iter(AutoModelForCausalLM.from_pretrained(other).state_dict().items()), fresh.version)
    after = engine.generate(prompts, sampling, list(range(6)))
    assert after == fresh.generate(prompts, sampling, list(range(6)))
    assert tokens_of(after) != tokens_of(before)


def test_weights_that_are_broadcast_are_the_ones_sampled_from(build: Builder, tmp_path: Path) -> None:
    """In buckets that cut layers that an engine fuses, and that are gone when the next one comes."""
    weights = AutoModelForCausalLM.from_pretrained(save_peaked_model(tmp_path / "other", seed=1)).state_dict()
    engine, store = build(save_peaked_model(tmp_path / "old", seed=0)), HashStore()
    prompts, sampling = random_prompts(6), SamplingParams(12)

    def sender() -> None:
        WeightChannel(store, 0, 2).send(iter(weights.items()), bucket_bytes=100_000)

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender)
        engine.update_weights(WeightChannel(store, 1, 2).receive(), version=1)
        sending.result()
    found = engine.generate(prompts, sampling, list(range(6)))
    engine.update_weights(iter(weights.items()), version=1)
    assert found == engine.generate(prompts, sampling, list(range(6)))


def test_unknown_missing_and_misshapen_weights_are_named(build: Builder, folder: Path, tmp_path: Path) -> None:
    engine = build(save_peaked_model(tmp_path / "old", seed=1))
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with pytest.raises(PacelineError, match=r"'model\.nonsense'"):
        engine.update_weights([*weights.items(), ("model.nonsense", torch.zeros(1))])
    with pytest.raises(PacelineError, match=r"model\.norm\.weight"):
        engine.update_weights([(name, tensor) for name, tensor in weights.items() if name != "model.norm.weight"])
    with pytest.raises(PacelineError, match=r"shape \(3,\)"):
        engine.update_weights({**weights, "model.norm.weight": torch.zeros(3)}.items())
    engine.update_weights(weights.items(), version=0)  # and it works on
    prompts, sampling = random_prompts(6), SamplingParams(12)
    assert engine.generate(prompts, sampling, [0] * 6) == build(folder).generate(prompts, sampling, [0] * 6)


def test_tied_weights_may_come_under_one_name_or_both(build: Builder, tmp_path: Path) -> None:
    def make_model(seed: int) -> Path:
        return make_tiny_model(tmp_path / str(seed), hidden=HIDDEN, seed=seed, initializer_range=0.2)

    engine, prompt = build(make_model(0)), [5, 6, 7]
    for seed, left_out in enumerate(["lm_head.weight", "model.embed_tokens.weight", None], start=1):
        model = AutoModelForCausalLM.from_pretrained(make_model(seed))
        assert model.config.tie_word_embeddings
        engine.update_weights((name, tensor) for name, tensor in model.state_dict().items() if name != left_out)
        [found] = engine.generate([prompt], SamplingParams(8), [0])
        expected = recomputed_log_probs(model, prompt, found.token_ids, 1.0)
        assert found.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_sleeping_and_waking_changes_nothing(engine: RolloutEngine) -> None:
    before = engine.generate([[5, 6, 7]], SamplingParams(8), [0])
    engine.sleep()
    engine.wake()
    assert engine.generate([[5, 6, 7]], SamplingParams(8), [0]) == before
