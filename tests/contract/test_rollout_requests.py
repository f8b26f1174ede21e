"""What every rollout engine must do with requests that come and go one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.catalog import ROLLOUTS
from paceline.errors import DataError, PacelineError
from paceline.rollout.hf import HfRollout
from paceline.rollout.rollout_interface import (
    Completion,
    Request,
    RequestId,
    RolloutEngine,
    SamplingParams,
)
from paceline.workers.sampling_thread import SamplingThread, Turns
from tests.contract.rollout_engines import (
    EOS,
    LONG_PROMPT,
    TOLERANCE,
    Builder,
    build,
    build_hf,
    build_vllm,
    folder,
    random_prompts,
    recomputed_log_probs,
    reference,
    save_peaked_model,
    vllm_is_gone_afterwards,
)

__all__ = ["build", "folder", "reference", "vllm_is_gone_afterwards"]
"""Fixtures of both files."""
MAX_NUM_SEQS = 4
"""Few, so that requests wait; one number, since each has a vLLM of its own."""


@pytest.fixture(scope="module")
def engine(build: Builder, folder: Path) -> RolloutEngine:
    return build(folder, max_num_seqs=MAX_NUM_SEQS)


def requests_of(prompts: list[list[int]], sampling: SamplingParams, first_seed: int = 0) -> list[Request]:
    return [Request(f"r{number}", prompt, sampling, seed=first_seed + number) for number, prompt in enumerate(prompts)]


def run_out(engine: RolloutEngine) -> dict[RequestId, Completion]:
    """Steps until nothing is under way."""
    collected: dict[RequestId, Completion] = {}
    while engine.has_work:
        engine.step()
        collected |= dict(engine.collect())
    return collected | dict(engine.collect())


def assert_equal_but_last_bits(found: Completion, wanted: Completion) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.finished_by_eos == wanted.finished_by_eos
    assert found.log_probs == pytest.approx(wanted.log_probs, abs=TOLERANCE)


def singly(build: Builder) -> None:
    if build is build_hf:
        pytest.skip("hf samples a batch to its end")


def test_what_was_sampled_so_far_is_the_beginning_of_the_response(build: Builder, engine: RolloutEngine) -> None:
    singly(build)
    request = Request("watched", [5, 6, 7], SamplingParams(12, ignore_eos=True), seed=3)
    engine.submit([request])
    seen: list[tuple[list[int], list[float]]] = []
    while not (ended := dict(engine.collect())):
        so_far = engine.sampled_so_far(request)
        seen.append((list(so_far.token_ids), list(so_far.log_probs)))
        engine.step()
    completion = ended["watched"]
    assert len(completion.token_ids) == 12
    assert len({len(tokens) for tokens, _ in seen}) > 6
    for tokens, log_probs in seen:
        assert (tokens, log_probs) == (completion.token_ids[: len(tokens)], completion.log_probs[: len(tokens)])


def test_requests_give_what_generate_gives_whenever_and_in_whatever_order_they_come(build: Builder, folder) -> None:
    eos, sampling = {EOS, 5, 40, 77}, SamplingParams(16, top_p=0.95)
    requests = requests_of(random_prompts(14), sampling)
    wanted = build(folder, eos, MAX_NUM_SEQS).generate(
        [request.prompt_ids for request in requests], sampling, [request.seed for request in requests]
    )
    engine = build(folder, eos, MAX_NUM_SEQS)
    collected: dict[RequestId, Completion] = {}
    for part in (slice(12, 14), slice(7, 12), slice(6, 7), slice(0, 6)):
        engine.submit(requests[part])
        engine.step()
        engine.step()
        found = dict(engine.collect())
        assert not found.keys() & collected.keys()
        collected |= found
    assert engine.num_running <= MAX_NUM_SEQS
    collected |= run_out(engine)
    assert not engine.has_work
    assert engine.num_running == engine.num_waiting == 0
    assert collected.keys() == {request.id for request in requests}
    for request, completion in zip(requests, wanted, strict=True):
        assert_equal_but_last_bits(collected[request.id], completion)
        assert collected[request.id].versions == [engine.version] * len(completion.token_ids)


def test_requests_under_way_may_be_sampled_in_different_ways(engine: RolloutEngine) -> None:
    prompts = random_prompts(8)
    ways = [SamplingParams(12), SamplingParams(7, do_sample=False), SamplingParams(9, temperature=0.5, top_k=4)]
    requests = [Request(number, prompt, ways[number % 3], seed=number) for number, prompt in enumerate(prompts)]
    engine.submit(requests)
    collected = run_out(engine)
    for request in requests:
        [alone] = engine.generate([request.prompt_ids], request.sampling, [request.seed])
        assert_equal_but_last_bits(collected[request.id], alone)


def test_an_aborted_request_that_goes_on_equals_one_that_was_left_alone(build: Builder, engine: RolloutEngine) -> None:
    singly(build)
    sampling = SamplingParams(20, temperature=1.2, ignore_eos=True)
    requests = requests_of(random_prompts(6), sampling, first_seed=50)
    wanted = engine.generate([request.prompt_ids for request in requests], sampling, list(range(50, 56)))
    engine.submit(requests)
    for _ in range(6):
        engine.step()
    assert len(engine.not_begun) == engine.num_waiting == 2
    aborted = dict(engine.abort([request.id for request in requests[1:]]))  # of which two still wait
    assert engine.not_begun == []
    lengths = [len(completion.token_ids) for completion in aborted.values()]
    assert min(lengths) == 0 < max(lengths) < 20
    assert not any(completion.finished_by_eos for completion in aborted.values())
    assert engine.num_running + engine.num_waiting == 1
    engine.submit([replace(request, sampled=aborted[request.id]) for request in requests[1:]])
    collected = run_out(engine)
    for request, completion in zip(requests, wanted, strict=True):
        assert_equal_but_last_bits(collected[request.id], completion)
        assert len(collected[request.id].versions) == 20


def test_a_request_that_has_ended_can_be_aborted_until_it_is_collected(engine: RolloutEngine) -> None:
    request = Request("one", [5, 6, 7], SamplingParams(1), seed=0)
    engine.submit([request])
    while engine.has_work:
        engine.step()
    [(name, completion)] = engine.abort(["one"])
    assert (name, len(completion.token_ids)) == ("one", 1)
    assert engine.collect() == []
    with pytest.raises(PacelineError, match=r"\['one'\] can't be aborted"):
        engine.abort(["one"])


def test_requests_that_can_not_be_taken_are_refused_and_leave_nothing_behind(engine: RolloutEngine) -> None:
    sampling = SamplingParams(4)
    with pytest.raises(DataError, match=r"prompts \[1\] have no tokens"):
        engine.submit([Request(1, [5], sampling, 0), Request(2, [], sampling, 0)])
    with pytest.raises(PacelineError, match=r"\[1\] come twice"):
        engine.submit([Request(1, [5], sampling, 0), Request(1, [6], sampling, 0)])
    with pytest.raises(PacelineError, match="nothing to go on with"):
        engine.submit([Request(1, [5], sampling, 0, sampled=Completion([7] * 4, [0.0] * 4, False, [0] * 4))])
    assert not engine.has_work
    engine.submit([Request(1, [5], sampling, 0)])
    with pytest.raises(PacelineError, match=r"\[1\] come twice"):
        engine.submit([Request(1, [5], sampling, 0)])
    assert run_out(engine).keys() == {1}


def test_batchwise_engines_say_so(folder: Path) -> None:
    assert [name for name, entry in ROLLOUTS.built_in.items() if not entry.takes_requests_singly] == ["hf"]
    assert not HfRollout.takes_requests_singly
    with pytest.raises(PacelineError, match=r"HfRollout samples whole responses only\. Take an engine"):
        build_hf(folder).submit([Request(1, [5], SamplingParams(4), 0, sampled=Completion([7], [0.0], False, [0]))])


@pytest.fixture(scope="module")
def two_models(build: Builder, tmp_path_factory: pytest.TempPathFactory) -> tuple[RolloutEngine, list[PreTrainedModel]]:
    """An engine for weights to change in, and two models whose weights it can take."""
    singly(build)
    folders = [save_peaked_model(tmp_path_factory.mktemp("updates") / str(seed), seed=seed) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    # Long enough for prompts of several blocks: vLLM's prefix cache holds whole ones.
    length = {"max_prompt_length": LONG_PROMPT} if build is build_vllm else {}
    return build(folders[0], max_num_seqs=8, **length), models


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_weights_change_between_two_steps(two_models, kv_cache) -> None:
    """Tokens before have the old version and log-probs, tokens after those of a recomputation under the new weights."""
    engine, (old, new) = two_models
    engine.update_weights(old.state_dict().items(), version=3)
    requests = requests_of([*random_prompts(5), [5] * 20, [5] * 20], SamplingParams(24, ignore_eos=True))
    engine.submit(requests)
    for _ in range(8):
        engine.step()
    engine.update_weights(new.state_dict().items(), version=5, kv_cache=kv_cache)
    collected = run_out(engine)
    changed = 0
    for request in requests:
        found = collected[request.id]
        at = found.versions.index(5)
        assert 4 <= at <= 12
        assert found.versions == [3] * at + [5] * (24 - at)
        for model, part in ((old, slice(0, at)), (new, slice(at, 24))):
            wanted = recomputed_log_probs(model, request.prompt_ids, found.token_ids, 1.0)[part]
            if kv_cache == "recompute" or model is old:
                assert found.log_probs[part] == pytest.approx(wanted.tolist(), abs=TOLERANCE)
            else:
                changed += found.log_probs[part] != pytest.approx(wanted.tolist(), abs=0.1)
    assert changed == (len(requests) if kv_cache == "keep" else 0)


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_requests_after_an_update_see_nothing_of_the_old_weights(two_models, kv_cache) -> None:
    """Their prompt is long enough to be cached, and stands in the cache of requests under way."""
    engine, (old, new) = two_models
    [prompt] = random_prompts(1, shortest=LONG_PROMPT, longest=LONG_PROMPT)
    sampling = SamplingParams(12, ignore_eos=True)
    engine.update_weights(new.state_dict().items())
    wanted = engine.generate([prompt] * 2, sampling, [7, 8])
    engine.update_weights(old.state_dict().items())
    engine.submit([Request(number, prompt, sampling, seed=number) for number in range(3)])
    for _ in range(4):
        engine.step()
    engine.update_weights(new.state_dict().items(), kv_cache=kv_cache)
    engine.submit([Request(number, prompt, sampling, seed=number) for number in (7, 8)])
    collected = run_out(engine)
    for number, completion in zip((7, 8), wanted, strict=True):
        assert_equal_but_last_bits(collected[number], completion)
        assert collected[number].versions == [engine.version] * 12
    assert collected[0].versions[0] == engine.version - 1


def test_an_aborted_request_goes_on_under_new_weights(two_models) -> None:
    engine, (old, new) = two_models
    engine.update_weights(old.state_dict().items(), version=0)
    [request] = requests_of([[5, 6, 7]], SamplingParams(16, ignore_eos=True))
    engine.submit([request])
    for _ in range(5):
        engine.step()
    [(_, sampled)] = engine.abort([request.id])
    engine.update_weights(new.state_dict().items(), version=1)
    engine.submit([replace(request, sampled=sampled)])
    found = run_out(engine)[request.id]
    at = len(sampled.token_ids)
    assert found.token_ids[:at] == sampled.token_ids
    assert found.versions == [0] * at + [1] * (16 - at)
    wanted = recomputed_log_probs(new, request.prompt_ids, found.token_ids, 1.0)[at:]
    assert found.log_probs[at:] == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def test_stepping_leaves_the_global_random_state_alone(engine: RolloutEngine) -> None:
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    engine.submit(requests_of(random_prompts(3), SamplingParams(4)))
    run_out(engine)
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_engine_decodes_in_a_thread_of_its_own(engine: RolloutEngine) -> None:
    requests, turns = requests_of(random_prompts(6), SamplingParams(8)), Turns()
    wanted = engine.generate([request.prompt_ids for request in requests], SamplingParams(8), list(range(6)))
    thread = SamplingThread(engine, turns)
    torch.manual_seed(3)
    before = torch.get_rng_state().tolist()
    collected: dict[RequestId, Completion] = {}
    try:
        with turns.call():
            engine.submit(requests)
        while len(collected) < 6:
            with turns.call():
                thread.check()
                assert torch.get_rng_state().tolist() == before
                collected |= dict(engine.collect())
    finally:
        with turns.call():
            thread.stop()
        thread.join()
    for request, completion in zip(requests, wanted, strict=True):
        assert_equal_but_last_bits(collected[request.id], completion)
