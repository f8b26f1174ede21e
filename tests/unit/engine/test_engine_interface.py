"""What callers may rely on is in the interface, and every backend has it."""

from __future__ import annotations

import inspect

import pytest

from paceline.config import ModelConfig
from paceline.engine import Engine, EngineSpec, HfEngine
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.backends.own_model import OwnModelEngine
from paceline.errors import ConfigError

SPEC = EngineSpec(ModelConfig(path="model"), "causal_lm")
# For the engines themselves, and for tests; workers do without.
OWN_NAMES = {"model", "root", "optimizer", "compute_dtype"}
OWN_MODEL_NAMES = {
    "strategy",
    "model_types",
    "hf_model",
    "named_full",
    "row_group",
    "row_rank",
    "tensor_parallel_size",
    "pipeline_parallel_size",
}


def public_names(cls: type) -> set[str]:
    annotated = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    return {name for name in {*dir(cls), *annotated} if not name.startswith("_")}


def test_an_interface_is_no_engine() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Engine(SPEC)
    with pytest.raises(TypeError, match="_distribute"):
        HfEngine(SPEC)


def test_engines_have_no_public_names_beside_the_interface() -> None:
    assert public_names(LocalEngine) - public_names(Engine) <= OWN_NAMES
    assert public_names(OwnModelEngine) - public_names(Engine) <= OWN_NAMES | OWN_MODEL_NAMES


def test_every_method_takes_what_the_interface_says() -> None:
    for name in ("train_batch", "infer_batch", "on_device", "save", "load", "write", "to"):
        assert inspect.signature(getattr(LocalEngine, name)).parameters.keys() == (
            inspect.signature(getattr(Engine, name)).parameters.keys()
        )


def test_an_engine_refuses_what_it_does_not_take() -> None:
    class Plain(LocalEngine):
        takes_bfloat16 = takes_offload = takes_compile = takes_packing = False

    for spec, message in (
        (EngineSpec(ModelConfig(path="m", compute_dtype="bfloat16"), "value"), "set model.compute_dtype=float32"),
        (EngineSpec(ModelConfig(path="m", use_torch_compile=True), "value"), "set model.use_torch_compile=False"),
        (EngineSpec(ModelConfig(path="m", use_remove_padding=True), "value"), "set model.use_remove_padding=False"),
        (EngineSpec(ModelConfig(path="m"), "value", param_offload=True), "set param_offload=False"),
        (EngineSpec(ModelConfig(path="m"), "value", optimizer_offload=True), "optimizer_offload=False"),
        (
            EngineSpec(ModelConfig(path="m"), "value", ulysses_sequence_parallel_size=2),
            "keeps a sequence on one device",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Plain(spec)
