"""Losses and gradients of a batch against TRL's, which runs in an environment of its own (`make bench-peers`)."""

from __future__ import annotations

import json
import random
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.engine import Engine
from tests.mixed import make_reward_model
from tests.texts import build_texts_trainer, text_config
from tests.tiny import build_tiny_model, make_tiny_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers/trl/bin/python"
TOLERANCE = 1e-5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not installed: make bench-peers"),
]


def texts(count: int, *columns: str) -> list[dict[str, str]]:
    """Rows of different lengths."""
    generator = random.Random(1)
    letters = string.ascii_lowercase
    return [
        {column: "".join(generator.choices(letters, k=generator.randint(3, 20))) for column in columns}
        for _ in range(count)
    ]


def of_trl(kind: str, model: Path, reference: Path, rows: list[dict[str, str]], folder: Path, **settings: Any) -> Any:
    """(loss, gradients by name)."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "trl.safetensors"
    script = str(ROOT / "benchmarks/peers/trl_losses.py")
    arguments = [PYTHON, script, kind, model, reference, folder / "rows.jsonl", output, json.dumps(settings)]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = load_file(output)
    return float(found.pop("loss")), found


def of_ours(
    root: type[SupervisedConfig],
    model: Path,
    rows: list[dict[str, str]],
    folder: Path,
    trained: Path | None = None,
    **changes: Any,
) -> Any:
    """The same, of the first step of a run; `trained` are the weights of the policy, if not those of `model`."""
    (folder / "ours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "data__train_files": str(folder / "ours.jsonl"),
        "data__val_files": None,
        "data__train_batch_size": len(rows),
    }
    cut = {"data__micro_batch_size_per_gpu": 3, "engine__grad_clip": 1e9, "optim__lr": 0.0}
    config = text_config(folder, folder / "run", model__path=str(model), **files, **cut, **changes)
    trainer = build_texts_trainer(root, config)
    engine: Any = trainer._processes._workers["actor"].engine  # type: ignore[union-attr]
    assert isinstance(engine, Engine)
    if trained is not None:
        engine.model.load_state_dict(load_file(trained / "model.safetensors"), strict=False)
    gradients: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def keep_gradients() -> None:
        named = engine.model.named_parameters()
        gradients.update({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})
        step()

    engine.optimizer.step = keep_gradients
    with trainer.run():
        metrics = trainer.update(next(iter(trainer.batches()))).get()[0]
    return metrics["train/loss"], gradients


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=TOLERANCE)
    assert set(ours[1]) == set(theirs[1])
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-4, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_sft(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", initializer_range=0.2)
    rows = texts(7, "prompt", "response")
    theirs = of_trl(
        "sft", model, model, [{"prompt": row["prompt"], "completion": row["response"]} for row in rows], tmp_path
    )
    assert_same(of_ours(SFTConfig, model, rows, tmp_path), theirs)


@pytest.mark.parametrize(("form", "beta"), [("sigmoid", 0.1), ("sigmoid_norm", 2.0), ("ipo", 0.3)])
def test_dpo(tmp_path: Path, form: str, beta: float) -> None:
    reference = make_tiny_model(tmp_path / "reference", initializer_range=0.2)
    policy = make_tiny_model(tmp_path / "policy", initializer_range=0.2)
    moved = build_tiny_model(initializer_range=0.2)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in moved.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    moved.save_pretrained(policy)
    rows = texts(7, "prompt", "chosen", "rejected")
    theirs = of_trl("dpo", policy, reference, rows, tmp_path, loss_type=form, beta=beta)
    changes = {"loss__form": form, "loss__beta": beta}
    assert_same(of_ours(DPOConfig, reference, rows, tmp_path, trained=policy, **changes), theirs)


def test_reward_model(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", initializer_range=0.2)
    model = make_reward_model(tmp_path / "model", base)
    rows = texts(7, "prompt", "chosen", "rejected")
    theirs = of_trl("reward", model, model, rows, tmp_path, center_rewards_coefficient=0.01)
    ours = of_ours(RewardModelTrainingConfig, model, rows, tmp_path, loss__center_rewards_coefficient=0.01)
    assert_same(ours, theirs)
