"""A backend with a model of its own, as docs/training_backends.md shows how to write one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine import get_engine
from paceline.errors import ConfigError
from tests.contract import engine_scenarios as scenarios
from tests.tiny import make_tiny_model

DOCS = Path(__file__).parents[4] / "docs/training_backends.md"


@pytest.fixture(scope="module", autouse=True)
def example() -> None:
    [code] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(code, {"__name__": "example"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.2)


def make_rank(strategy: str, folder: Path) -> scenarios.Rank:
    return scenarios.Rank(scenarios.Backend(strategy, 1), scenarios.Models(folder, folder, folder), 0)


def test_the_documented_backend_trains_like_local_and_goes_on_from_its_checkpoint(folder: Path, tmp_path: Path):
    mine, local = (make_rank(strategy, folder) for strategy in ("mine", "local"))
    one, other = mine.engine(), local.engine()
    for metrics, expected in zip(mine.train(one), local.train(other), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    other.save(tmp_path)
    resumed = mine.engine()
    resumed.load(tmp_path)
    resumed.save(tmp_path / "again")
    assert scenarios.equal(scenarios.full_weights(resumed), scenarios.full_weights(other))
    saved, again = (torch.load(path / "optimizer.pt") for path in (tmp_path, tmp_path / "again"))
    assert again["num_steps"] == saved["num_steps"] == scenarios.STEPS
    for name, moments in saved["moments"].items():
        assert scenarios.equal(moments, again["moments"][name])


@pytest.mark.device
def test_what_is_put_away_between_calls_changes_nothing_and_is_not_on_the_device(folder: Path, tmp_path: Path):
    rank = make_rank("mine", folder)
    scenarios.offload(rank, tmp_path)
    kept = rank.engine()
    rank.train(kept)
    assert scenarios.equal(rank.seen["offloaded/weights"], scenarios.full_weights(kept))
    assert rank.seen["offloaded/bytes_left"] < 0.1 * rank.seen["offloaded/bytes_of_weights"]


def test_a_model_that_says_something_else_than_hugging_face_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine_class: Any = get_engine("mine")

    class Wrong(engine_class):
        def _put_weights(self, weights: dict[str, torch.Tensor]) -> None:
            super()._put_weights({name: -weight for name, weight in weights.items()})

    spec = replace(scenarios.SPEC, model=ModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match=r"does not compute what .* means: \w+ of two short sequences differ"):
        Wrong(spec).initialize()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "a model of type llama: it has qwen2. Set strategy=fsdp2."),
        ({}, "tensor_model_parallel_size=2, which does not divide its 1 ranks"),
    ],
)
def test_models_and_sizes_that_it_can_not_hold_are_refused(tmp_path: Path, settings: dict[str, Any], message: str):
    model = ModelConfig(path=str(make_tiny_model(tmp_path, **settings)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        get_engine("mine")(replace(scenarios.SPEC, model=model, tensor_model_parallel_size=2)).initialize()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(compute_dtype="bfloat16")}, "set model.compute_dtype=float32"),
        ({"lora": scenarios.LORA}, "set model.lora_rank=0, or strategy=local or fsdp2"),
    ],
)
def test_what_works_on_hugging_face_models_alone_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        get_engine("mine")(replace(scenarios.SPEC, **changes))
