"""Adapters against an obvious implementation, against the base model and against peft's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from paceline.config import ModelConfig, OptimConfig, TrainedModelConfig
from paceline.engine import Engine, EngineSpec
from paceline.engine.backends.fsdp import FsdpEngine
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.lora import LoraSpec
from paceline.errors import CheckpointError, ConfigError
from tests.contract.engine_scenarios import equal, full_weights, make_mini_batch, policy_loss, record_gradients
from tests.tiny import make_tiny_model

LORA = LoraSpec(rank=3, alpha=6)
SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=2, initializer_range=0.2)


@pytest.fixture(scope="module")
def spec(folder: Path) -> EngineSpec:
    return EngineSpec(TrainedModelConfig(path=str(folder)), "causal_lm", OptimConfig(lr=1e-2), 1e6, lora=LORA)


def make_engine(spec: EngineSpec, *, random_b: bool = True) -> Engine:
    """An engine whose B are random: at 0, as they begin, much would be equal by itself."""
    torch.manual_seed(3)
    engine = LocalEngine(spec)
    engine.initialize()
    if random_b:
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return engine


def by_hand(folder: Path, engine: Engine) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Log-probs (rows, response), adapters, and their gradients of policy_loss, by W + scale B A in a plain model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in engine.model.named_parameters()
        if "lora_" in name
    }
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for name in {name.partition(".lora_")[0] for name in adapters}:
        a, b = adapters[f"{name}.lora_A.default.weight"], adapters[f"{name}.lora_B.default.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + SCALE * b @ a
    batch = make_mini_batch().batch
    logits = functional_call(
        model,
        weights,
        kwargs={name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")},
    ).logits
    response = batch["response_mask"].shape[-1]
    distribution = torch.distributions.Categorical(logits=logits[:, -response - 1 : -1])
    log_probs = distribution.log_prob(batch["input_ids"][:, -response:]) * batch["response_mask"]
    loss, _ = policy_loss({"log_probs": log_probs, "entropy": distribution.entropy() * batch["response_mask"]}, batch)
    gradients = torch.autograd.grad(loss, list(adapters.values()))
    return log_probs.detach(), adapters, dict(zip(adapters, gradients, strict=True))


@pytest.mark.parametrize(
    "model",
    [{}, {"use_remove_padding": True}, {"enable_gradient_checkpointing": True}],
    ids=["padded", "packed", "recomputed"],
)
def test_log_probs_and_gradients_are_those_of_w_plus_b_a(spec: EngineSpec, folder: Path, model: dict[str, Any]) -> None:
    engine = make_engine(replace(spec, model=replace(spec.model, **model)))
    log_probs, _, gradients = by_hand(folder, engine)
    output = engine.infer_batch(make_mini_batch(), micro_batch_size=4)["log_probs"]
    torch.testing.assert_close(output, log_probs, atol=1e-5, rtol=0)
    trained = {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(value) for name, value in engine.model.named_parameters() if "lora_" in name}
    frozen = {name: value.clone() for name, value in engine.model.state_dict().items() if "lora_" not in name}
    seen = record_gradients(engine)
    engine.train_batch(make_mini_batch(), policy_loss, micro_batch_size=4)
    assert gradients.keys() == seen[0].keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(seen[0][name], gradient, atol=1e-5, rtol=0)
    assert equal(frozen, {name: value for name, value in engine.model.state_dict().items() if "lora_" not in name})


def test_the_reference_is_the_base_model_bit_for_bit(spec: EngineSpec) -> None:
    engine = make_engine(spec)
    base = make_engine(replace(spec, lora=None, optim=None), random_b=False)
    data = make_mini_batch()
    expected = base.infer_batch(data, micro_batch_size=2)["log_probs"]
    with engine.without_adapter():
        assert torch.equal(engine.infer_batch(data, micro_batch_size=2)["log_probs"], expected)
    adapted = engine.infer_batch(data, micro_batch_size=2)["log_probs"]
    assert (adapted - expected).abs().max() > 0.01
    engine.train_batch(data, policy_loss, micro_batch_size=2)
    with engine.without_adapter():
        assert torch.equal(engine.infer_batch(data, micro_batch_size=2)["log_probs"], expected)


def test_a_new_adapter_changes_nothing(spec: EngineSpec, folder: Path) -> None:
    engine = make_engine(spec, random_b=False)
    assert equal(full_weights(engine), dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()))


def test_files_are_pefts_and_merged_weights_are_those_that_it_merges(
    spec: EngineSpec, folder: Path, tmp_path: Path
) -> None:
    engine = make_engine(spec)
    engine.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
    }
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == 2 * 14
    merged = theirs.merge_and_unload()
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    assert equal(full_weights(engine), dict(merged.state_dict()))
    assert equal(before, dict(engine.model.state_dict()))
    batch = make_mini_batch().batch
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, engine.model(**inputs).logits, atol=1e-4, rtol=0)


def test_layers_that_keep_their_weights_transposed_are_merged_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"))
    engine = make_engine(EngineSpec(model, "causal_lm", OptimConfig(), lora=replace(LORA, target_modules="c_attn")))
    engine.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = PeftModel.from_pretrained(base, tmp_path / "saved").merge_and_unload()
    weights = full_weights(engine)
    torch.testing.assert_close(weights, {name: merged.state_dict()[name] for name in weights}, atol=0, rtol=0)
    assert not torch.equal(
        weights["transformer.h.0.attn.c_attn.weight"],
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()["transformer.h.0.attn.c_attn.weight"],
    )


@pytest.mark.parametrize(
    ("targets", "layers"),
    [("q_proj", 2), (["q_proj", "up_proj"], 4), (["layers.1.mlp.down_proj"], 1), ("all-linear", 14)],
)
def test_target_modules_choose_the_layers(spec: EngineSpec, targets: Any, layers: int) -> None:
    engine = make_engine(replace(spec, lora=replace(LORA, target_modules=targets)))
    assert sum(parameter.requires_grad for parameter in engine.model.parameters()) == 2 * layers


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "qproj"], r"no linear layer named qproj; set it to all-linear or to names among: .*q_proj"),
        ("embed_tokens", "no linear layer named embed_tokens"),
        (["lm_head"], "lm_head, whose weight is the embedding's too"),
    ],
)
def test_target_modules_that_match_nothing_are_an_error(spec: EngineSpec, targets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(replace(spec, lora=replace(LORA, target_modules=targets)))


def test_a_backend_without_lora_refuses_it(spec: EngineSpec) -> None:
    with pytest.raises(ConfigError, match="or strategy=local or fsdp2"):
        FsdpEngine(spec)


def test_checkpoints_of_other_settings_are_refused(spec: EngineSpec, tmp_path: Path) -> None:
    make_engine(spec).save(tmp_path / "adapter")
    make_engine(replace(spec, lora=None), random_b=False).save(tmp_path / "whole")
    other = make_engine(replace(spec, lora=replace(LORA, rank=4)))
    with pytest.raises(CheckpointError, match=r"trained with model.lora_rank=3, and this run has 4"):
        other.load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"not of a run with LoRA. Set model.lora_rank=0"):
        other.load(tmp_path / "whole")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file)
    with pytest.raises(CheckpointError, match=r"its adapter belongs to another model \(they differ in .*lora_A"):
        make_engine(spec).load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="holds a LoRA adapter alone"):
        make_engine(replace(spec, lora=None), random_b=False).load(tmp_path / "adapter")
