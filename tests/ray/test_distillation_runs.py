"""Distillation on a real Ray: as a command, the teachers on processes of their own, sharded by two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import train_in_process
from tests.runs import as_overrides, base_config, make_material, read_metrics, results
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs/distillation.md"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_material(tmp_path_factory.mktemp("material"))
    make_tiny_model(folder / "teacher", hidden=64, seed=7, initializer_range=0.1)
    return folder


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings = base_config(
        material,
        run_dir,
        distillation__teacher_models__one__model_path=str(material / "teacher"),
        trainer__total_training_steps=2,
    )
    del settings["actor_rollout_ref.actor.use_kl_loss"]
    return settings | {key.replace("__", "."): value for key, value in changes.items()}


def distill(settings: dict[str, Any], num_cpus: int) -> None:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    arguments = [*as_overrides(settings), f"ray_kwargs.ray_init.num_cpus={num_cpus}"]
    done = subprocess.run([sys.executable, "-c", code, "distill", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone")
    preset = {
        "distillation.enabled": True,
        "distillation.distillation_loss.use_task_rewards": False,
        "distillation.distillation_loss.loss_mode": "k2",
    }
    train_in_process(config(material, run_dir) | preset)
    return run_dir


@pytest.mark.parametrize(
    "changes",
    [{}, {"trainer.n_gpus_per_node": 2, "trainer.placement.name": "split"}, {"distillation.n_gpus_per_node": 1}],
    ids=["colocated", "split", "apart"],
)
def test_the_command_gives_the_numbers_of_one_process_in_every_placement(
    material: Path, alone: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    distill(config(material, tmp_path, **changes), num_cpus=2)
    assert results(tmp_path) == results(alone)


def test_a_teacher_sharded_by_two_ranks_says_the_same(material: Path, alone: Path, tmp_path: Path) -> None:
    distill(config(material, tmp_path, distillation__n_gpus_per_node=2), num_cpus=3)
    name = "actor/distillation/loss"
    assert read_metrics(tmp_path)[1][name] == pytest.approx(read_metrics(alone)[1][name], rel=1e-4)


def test_several_tokens_from_sharded_actor_and_teachers(material: Path, tmp_path: Path) -> None:
    sharded = {
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "distillation.distillation_loss.loss_mode": "forward_kl_topk_tail",
        "distillation.distillation_loss.topk": 4,
    }
    distill(config(material, tmp_path / "two", **sharded), num_cpus=2)
    one = {key: value for key, value in sharded.items() if key.startswith("distillation")}
    distill(config(material, tmp_path / "one", **one), num_cpus=2)
    for name in ("actor/distillation/loss", "actor/distillation/student_mass", "actor/grad_norm"):
        found = [read_metrics(tmp_path / run)[1][name] for run in ("one", "two")]
        assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_the_python_of_the_page_trains(material: Path, tmp_path: Path) -> None:
    """The block of docs/distillation.md, with one step of short responses."""
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "steps=100" in block
    (tmp_path / "student").symlink_to(material / "model")
    for name in ("teacher", "train.parquet", "test.parquet"):
        (tmp_path / name).symlink_to(material / name)
    keys = "steps=1, max_prompt_length=32, max_response_length=8, config={'ray_kwargs.ray_init.num_cpus': 2}"
    program = block.replace("steps=100", keys)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    loss, model = done.stdout.strip().splitlines()[-1].split(" ", 1)
    assert float(loss) > 0
    assert (Path(model) / "config.json").exists()
