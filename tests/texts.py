"""Small real runs on given texts, in this process: data, configurations, trainers."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.config import SupervisedConfig
from paceline.config.load import read_config_of
from paceline.data.tokenizer import load_tokenizer
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.complete import complete_supervised
from paceline.trainer.objectives import OBJECTIVES
from paceline.trainer.supervised_trainer import SupervisedTrainer
from tests.device import DEVICE, ON_CPU
from tests.runs import as_omegaconf
from tests.tiny import make_tiny_model


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def sums(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one or two turns, of different lengths."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        messages = []
        for _ in range(1 + index % 2):
            a, b = generator.randint(0, 99), generator.randint(0, 99)
            words = "so " * generator.randint(0, 4)
            messages += [
                {"role": "user", "content": f"{a}+{b}="},
                {"role": "assistant", "content": f"{words}{a + b}"},
            ]
        rows.append({"messages": messages})
    return rows


def quiet_pairs(count: int, seed: int = 0, flipped: float = 0.0) -> list[dict[str, Any]]:
    """Replies of which the one in small letters is the better one; a share has its labels the other way round."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        first, second = (
            "".join(generator.choices("abcdefgh", k=generator.randint(3, 9))),
            "".join(generator.choices("abcdefgh", k=generator.randint(3, 9))).upper(),
        )
        if generator.random() < flipped:
            first, second = second, first
        rows.append({"prompt": [{"role": "user", "content": f"say {index}"}], "chosen": first, "rejected": second})
    return rows


def make_texts(folder: Path, rows: int = 11) -> Path:
    """A folder with model, chats.parquet, pairs.parquet and held-out rows of each; a number that does not divide."""
    make_tiny_model(folder / "model", initializer_range=0.2)
    write_rows(folder / "chats.parquet", sums(rows))
    write_rows(folder / "val_chats.parquet", sums(5, seed=1))
    write_rows(folder / "pairs.parquet", quiet_pairs(rows))
    write_rows(folder / "val_pairs.parquet", quiet_pairs(5, seed=1))
    return folder


def text_config(material: Path, run_dir: Path, files: str = "chats", **changes: Any) -> dict[str, Any]:
    """Key -> value of a small run; keyword names are keys with `.` written as `__`."""
    config: dict[str, Any] = {
        "data.train_files": str(material / f"{files}.parquet"),
        "data.val_files": str(material / f"val_{files}.parquet"),
        "data.train_batch_size": 4,
        "data.max_length": 96,
        "model.path": str(material / "model"),
        "optim.lr": 1e-2,
        "trainer.total_epochs": 2,
        "trainer.threads_per_worker": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": ["console"],
        "trainer.default_local_dir": str(run_dir),
    }
    if not ON_CPU:
        config["trainer.device"] = DEVICE
    return config | {key.replace("__", "."): value for key, value in changes.items()}


def build_texts_trainer(root: type[SupervisedConfig], config: dict[str, Any]) -> SupervisedTrainer:
    """The trainer of a run, its worker in this process and ready."""
    cfg = complete_supervised(read_config_of(root, as_omegaconf(config)))
    trainer = SupervisedTrainer(cfg, load_tokenizer(str(cfg.model.path)), OBJECTIVES[root], InProcessWorkerGroup)
    trainer.init_workers()
    return trainer


def train_on_texts(root: type[SupervisedConfig], config: dict[str, Any]) -> Path:
    """A whole run; gives its folder."""
    trainer = build_texts_trainer(root, config)
    trainer.fit()
    gc.collect()
    return trainer.run_dir
