"""A model whose layers are compiled trains as one whose layers are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.config import ModelConfig, TrainedModelConfig
from paceline.engine import get_engine
from paceline.errors import ConfigError
from paceline.private_apis.transformers_private import decoder_layers
from tests.contract import engine_scenarios as scenarios
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow  # the compiler takes its time

PADDED = TrainedModelConfig(use_remove_padding=False)
MODELS = {"padded": PADDED, "packed": scenarios.PACKED, "packed and recomputed": scenarios.RECOMPUTED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.2)


def trained(strategy: str, folder: Path, model: ModelConfig) -> tuple[dict[str, Tensor], list[dict], dict[str, Tensor]]:
    """Columns of a forward pass, metrics of two steps, and the gradients of the first."""
    rank = scenarios.Rank(scenarios.Backend(strategy, 1), scenarios.Models(folder, folder, folder), 0)
    engine = rank.engine(replace(scenarios.SPEC, model=model))
    answers = engine.infer_batch(rank.shard(scenarios.make_mini_batch()), max_tokens=22)
    gradients = scenarios.record_gradients(engine)
    metrics = rank.train(engine, steps=2, max_tokens=22)
    assert not any("forward" in vars(layer) for layer in decoder_layers(engine.model)), "a rollout calls them as ever"
    return answers, metrics, gradients[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["local", "fsdp2", "fsdp"])
def test_compiled_layers_change_results_by_rounding(strategy: str, name: str, folder: Path) -> None:
    plain = trained(strategy, folder, MODELS[name])
    torch._dynamo.utils.counters.clear()
    answers, metrics, gradients = trained(strategy, folder, replace(MODELS[name], use_torch_compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert not torch._dynamo.utils.counters["unimplemented"]
    for column, values in answers.items():
        torch.testing.assert_close(values, plain[0][column], atol=1e-5, rtol=1e-5)
    for found, expected in zip(metrics, plain[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for parameter, values in gradients.items():
        torch.testing.assert_close(values, plain[2][parameter], atol=1e-5, rtol=1e-4)
    torch.distributed.destroy_process_group() if torch.distributed.is_initialized() else None


def test_a_compiler_that_fails_is_an_error_that_says_what_to_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> nn.Module:
        raise RuntimeError("no compiler here")

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled(function, dynamic=dynamic, backend=fail))
    spec = replace(scenarios.SPEC, model=replace(PADDED, path=str(folder), use_torch_compile=True))
    with pytest.raises(ConfigError, match=r"(?s)can't be compiled here: .*Set model.use_torch_compile=False"):
        get_engine("local")(spec).initialize()
