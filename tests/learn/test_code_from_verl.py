"""A run with what people bring from verl: keys under its names, a dataset and a sampler of their own, a copied loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.config.load import read_config
from tests.in_process import build_in_process, train_in_process
from tests.runs import base_config, make_material, results

CLASSES = '''
from paceline.data import RLHFDataset

class Counted(RLHFDataset):
    """Ours, with a column more."""
    def __getitem__(self, item):
        return {**super().__getitem__(item), "place": item}

class Backwards:
    def __init__(self, data_source, data_config):
        self.rows = list(range(len(data_source)))[::-1]
    def __len__(self):
        return len(self.rows)
    def __iter__(self):
        return iter(self.rows)
'''


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_material(tmp_path_factory.mktemp("material"))
    (folder / "mine.py").write_text(CLASSES)
    return folder


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return base_config(material, run_dir, trainer__total_training_steps=2, trainer__save_freq=1, **changes)


def test_names_of_verls_give_the_run_that_ours_give(material: Path, tmp_path: Path) -> None:
    ours = {"critic__optim__lr": 2e-5, "actor_rollout_ref__actor__grad_clip": 0.5}
    theirs = {
        "critic__optim__lr": 2e-5,
        "actor_rollout_ref__actor__optim__clip_grad": 0.5,
        "model_engine": "dp",
        "actor_rollout_ref__actor__use_torch_compile": False,
        "actor_rollout_ref__rollout__calculate_log_probs": True,
        "critic__fsdp__forward_prefetch": True,
    }
    train_in_process(config(material, tmp_path / "ours", **ours))
    train_in_process(config(material, tmp_path / "theirs", **theirs))
    assert results(tmp_path / "theirs") == results(tmp_path / "ours")
    saved = OmegaConf.load(tmp_path / "theirs" / "config.yaml")
    assert read_config(saved).notes == []  # a run keeps its configuration in our names


def test_a_dataset_and_a_sampler_of_the_users_own_make_the_batches_of_a_run(material: Path, tmp_path: Path) -> None:
    file = str(material / "mine.py")
    classes = {
        "data__custom_cls__path": file,
        "data__custom_cls__name": "Counted",
        "data__sampler__class_path": file,
        "data__sampler__class_name": "Backwards",
    }
    trainer = build_in_process(config(material, tmp_path, **classes))
    count, size = len(trainer.train_dataloader.dataset), trainer.cfg.data.train_batch_size
    drawn: list[list[int]] = []
    draw = trainer.draw_requests

    def watched(purpose: str, step: int) -> Any:
        requests, labels, drawing = draw(purpose, step)
        drawn.append(labels.non_tensor_batch["place"].tolist())
        return requests, labels, drawing

    trainer.draw_requests = watched  # type: ignore[method-assign]
    trainer.fit()
    n = trainer.config.actor_rollout_ref.rollout.n
    backwards = list(range(count))[::-1]
    assert [row for batch in drawn for row in batch][: 2 * size * n : n] == backwards[: 2 * size]
    assert trainer.global_steps == 2
    assert OmegaConf.to_container(trainer.config)["trainer"]["total_training_steps"] == 2
