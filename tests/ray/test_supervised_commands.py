"""Training on given texts on Ray: as commands, and on two ranks, which train as one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from tests.runs import as_overrides, read_metrics
from tests.texts import make_texts, text_config, train_on_texts

KINDS: dict[type[SupervisedConfig], tuple[str, str]] = {
    SFTConfig: ("sft", "chats"),
    RewardModelTrainingConfig: ("reward-model", "pairs"),
    DPOConfig: ("dpo", "pairs"),
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("texts"))


def command(name: str, config: dict[str, Any]) -> str:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, name, *as_overrides(config), "ray_kwargs.ray_init.num_cpus=2"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_command_trains_and_says_what_it_made(material: Path, tmp_path: Path) -> None:
    config = text_config(material, tmp_path / "run", trainer__test_freq=None, trainer__total_training_steps=2)
    said = command("sft", config)
    assert "11 rows, 4 an optimizer step: 3 steps an epoch, 2 in all" in said
    assert f"the trained model is in {tmp_path / 'run/model'}" in said
    assert "next: paceline report" in said
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("root", KINDS, ids=lambda root: root.__name__)
def test_two_sharded_ranks_train_as_one(material: Path, tmp_path: Path, root: type[SupervisedConfig]) -> None:
    """Eleven rows and four a step: neither an epoch nor its last step divides by two ranks."""
    name, files = KINDS[root]
    changes = {"trainer__total_epochs": 1, "trainer__test_freq": 3, "optim__lr": 1e-3}
    one = train_on_texts(root, text_config(material, tmp_path / "one", files, **changes))
    two = tmp_path / "two"
    command(name, text_config(material, two, files, trainer__n_gpus_per_node=2, engine__strategy="fsdp2", **changes))
    for line, other in zip(read_metrics(one), read_metrics(two), strict=True):
        # The score head of a reward model is drawn by rank 0, whose random state is that of one process.
        for metric in ("train/loss", "train/grad_norm", "val/loss"):
            assert other.get(metric) == pytest.approx(line.get(metric), rel=2e-4)
