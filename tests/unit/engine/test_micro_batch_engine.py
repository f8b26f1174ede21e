"""What is offloaded is on the device exactly while an engine works."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers.utils import logging as transformers_logging

from paceline.config import ModelConfig, OptimConfig
from paceline.engine import EngineSpec
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.hf_models import quiet_transformers
from tests.contract.engine_scenarios import make_mini_batch, policy_loss
from tests.tiny import make_tiny_model

IN, OUT = "to the device", "to main memory"


class RecordingEngine(LocalEngine):
    """Takes note of what moves, and fails if anything is called that is not there. On a CPU nothing really moves."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.moves: list[tuple[str, str]] = []
        self.here = {"parameters", "optimizer"}

    def _move(self, part: Any, device: str) -> None:
        super()._move(part, device)
        self.here ^= {part}
        self.moves.append((part, IN if part in self.here else OUT))

    def _forward(self, micro_batch: TensorDict, temperature: float, **asked: bool) -> dict[str, Tensor]:
        assert "parameters" in self.here
        return super()._forward(micro_batch, temperature, **asked)

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        assert self.here == {"parameters", "optimizer"}
        return super()._clip_grad_norm(max_norm)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)
    return EngineSpec(ModelConfig(path=str(folder)), "causal_lm", OptimConfig(lr=1e-3))


def make_engine(spec: EngineSpec, **offload: bool) -> RecordingEngine:
    engine = RecordingEngine(replace(spec, **offload))
    engine.initialize()
    assert engine.moves == [(part, OUT) for part in sorted(engine._away)]
    engine.moves.clear()
    return engine


def infer(engine: RecordingEngine, folder: Path) -> None:
    engine.infer_batch(make_mini_batch(), micro_batch_size=2)


def train(engine: RecordingEngine, folder: Path) -> None:
    engine.train_batch(make_mini_batch(), policy_loss, micro_batch_size=2)


def give_weights(engine: RecordingEngine, folder: Path) -> None:
    assert all("parameters" in engine.here for _ in engine.named_full_weights())


def save(engine: RecordingEngine, folder: Path) -> None:
    engine.save(folder / "saved")


def fail(engine: RecordingEngine, folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(make_mini_batch(), lambda *_: 1 / 0, micro_batch_size=2)


PARAMETERS = [("parameters", IN), ("parameters", OUT)]
OPTIMIZER = [("optimizer", IN), ("optimizer", OUT)]
BOTH = [("optimizer", IN), ("parameters", IN), ("optimizer", OUT), ("parameters", OUT)]


@pytest.mark.parametrize(
    ("call", "parameters", "optimizer", "both"),
    [
        (infer, PARAMETERS, [], PARAMETERS),
        (give_weights, PARAMETERS, [], PARAMETERS),
        (train, PARAMETERS, OPTIMIZER, BOTH),
        (save, PARAMETERS, OPTIMIZER, BOTH),
        (fail, PARAMETERS, OPTIMIZER, BOTH),
    ],
)
def test_calls_bring_what_they_need_and_put_it_away(
    spec: EngineSpec,
    tmp_path: Path,
    call: Callable[[RecordingEngine, Path], None],
    parameters: list[tuple[str, str]],
    optimizer: list[tuple[str, str]],
    both: list[tuple[str, str]],
) -> None:
    settings = {
        (False, False): [],
        (True, False): parameters,
        (False, True): optimizer,
        (True, True): both,
    }
    for (param_offload, optimizer_offload), moves in settings.items():
        engine = make_engine(spec, param_offload=param_offload, optimizer_offload=optimizer_offload)
        call(engine, tmp_path)
        assert engine.moves == moves


def test_several_calls_in_one_context_move_once(spec: EngineSpec, tmp_path: Path) -> None:
    engine = make_engine(spec, param_offload=True, optimizer_offload=True)
    with engine.on_device(optimizer=True):
        for call in (train, train, infer, give_weights):
            call(engine, tmp_path)
    assert engine.moves == BOTH


def test_what_was_saved_while_offloaded_is_loaded_while_offloaded(spec: EngineSpec, tmp_path: Path) -> None:
    engine = make_engine(spec, param_offload=True, optimizer_offload=True)
    train(engine, tmp_path)
    save(engine, tmp_path)
    other = make_engine(spec, param_offload=True, optimizer_offload=True)
    other.load(tmp_path / "saved")
    assert other.moves == BOTH
    for name, weight in dict(engine.named_full_weights()).items():
        assert torch.equal(weight, dict(other.named_full_weights())[name])


@pytest.fixture
def progress_bars() -> Iterator[None]:
    """On, whatever another test of this process has left."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    yield
    if not were_on:
        transformers_logging.disable_progress_bar()


@pytest.mark.usefixtures("progress_bars")
def test_threads_leave_transformers_as_talkative_as_they_found_it() -> None:
    """A checkpoint is written in a thread while another role may read a model."""
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    loud: list[bool] = []

    def work() -> None:
        for _ in range(300):
            with quiet_transformers():
                loud.append(transformers_logging.is_progress_bar_enabled())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not any(loud)
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
