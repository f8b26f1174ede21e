"""Mistakes in the configurations of training on given texts, each with its message; all are found together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.config.checks import without_unread
from paceline.config.checks.supervised_checks import check_supervised
from paceline.config.load import read_config_of
from paceline.config.overrides import check_overrides
from paceline.errors import ConfigError
from tests.stand_ins import with_changes, write_model_folder

SFT, RM, DPO = SFTConfig, RewardModelTrainingConfig, DPOConfig

BAD: list[tuple[type[SupervisedConfig], dict[str, Any], str]] = [
    (SFT, {"data.train_file": "x"}, "data.train_file is not a key; did you mean data.train_files?"),
    (SFT, {"actor_rollout_ref.model.path": "x"}, "actor_rollout_ref is not a key"),
    (SFT, {"trainer.overlap": "none"}, "trainer.overlap is not a key"),
    (SFT, {"loss.beta": 0.1}, "loss is not a key"),
    (SFT, {"data.max_length": "long"}, "data.max_length wants a whole number; got 'long' (str)."),
    (SFT, {"data.truncation": "middle"}, "data.truncation='middle' is not known"),
    (SFT, {"data.max_length": 0}, "data.max_length=0 is out of range; set it to a number >= 1."),
    (SFT, {"data.train_files": None}, "data.train_files is not set"),
    (SFT, {"data.train_files": "/no/such.parquet"}, "data.train_files: there is no file /no/such.parquet"),
    (
        SFT,
        {"data.train_files": "{pairs}"},
        "wants the columns 'messages' (data.messages_key) or 'prompt' (data.prompt_key) and 'response'",
    ),
    (SFT, {"data.messages_key": ""}, "data.messages_key is empty; set it to the name of a column."),
    (SFT, {"data.train_files": "{empty}"}, "data.train_files: there are no rows in"),
    (SFT, {"data.drop_last": True, "data.train_batch_size": 9}, "there are 3 rows, less than one batch of"),
    (SFT, {"model.path": None}, "model.path is not set"),
    (SFT, {"model.path": "/no/model"}, "model.path: there is no folder /no/model"),
    (SFT, {"engine.strategy": "fsdp3"}, "engine.strategy='fsdp3' is not known"),
    (SFT, {"engine.strategy": "local", "trainer.n_gpus_per_node": 2}, "engine.strategy=local works on one device"),
    (SFT, {"engine.strategy": "fsdp", "model.lora_rank": 4}, "model.lora_rank=4: engine.strategy=fsdp has no LoRA"),
    (
        SFT,
        {"trainer.n_gpus_per_node": 8, "data.train_batch_size": 4},
        "data.train_batch_size=4 leaves some of 8 devices",
    ),
    (SFT, {"trainer.test_freq": 5}, "trainer.test_freq=5 has nothing to validate on"),
    (SFT, {"trainer.max_restarts": 1}, "there would be no checkpoint to start again from"),
    (SFT, {"trainer.logger": ["wanb"]}, "trainer.logger='wanb' is not known; did you mean wandb?"),
    (
        RM,
        {"data.train_files": "{chats}"},
        "'chosen' (data.chosen_key) and 'rejected' (data.rejected_key), and has messages",
    ),
    (RM, {"model.lora_rank": 4}, "a reward model has a new score head, which adapters leave untrained. Set it to 0."),
    (RM, {"data.truncation": "right"}, "data.truncation=right would cut the replies of pairs"),
    (DPO, {"loss.beta": 0}, "loss.beta=0.0 is out of range; set it to a number > 0."),
    (DPO, {"loss.form": "hinge"}, "loss.form='hinge' is not known"),
    (DPO, {"loss.form": "ipo", "loss.label_smoothing": 0.1}, "loss.label_smoothing is not of loss.form=ipo"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    chat = [{"role": "user", "content": "a"}]
    tables = {
        "chats": [{"messages": chat}] * 3,
        "pairs": [{"prompt": chat, "chosen": "a", "rejected": "b"}] * 3,
    }
    paths = {name: folder / f"{name}.parquet" for name in (*tables, "empty")}
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), paths[name])
    pq.write_table(pa.Table.from_pylist(tables["chats"]).slice(0, 0), paths["empty"])
    return {**paths, "model": write_model_folder(folder / "model"), "run": folder / "run"}


def problems(root: type[SupervisedConfig], changes: dict[str, Any], files: dict[str, Path]) -> list[str]:
    good = {
        "data": {"train_files": str(files["chats" if root is SFT else "pairs"])},
        "model": {"path": str(files["model"])},
        "trainer": {"default_local_dir": str(files["run"]), "device": "cpu"},
    }
    reading = read_config_of(root, with_changes(good, changes, files))
    return without_unread(check_supervised(reading.cfg), reading.problems)


@pytest.mark.parametrize("root", [SFT, RM, DPO], ids=lambda root: root.__name__)
def test_what_is_right_has_no_problems(root: type[SupervisedConfig], files: dict[str, Path]) -> None:
    assert problems(root, {}, files) == []


@pytest.mark.parametrize(("root", "changes", "message"), BAD, ids=[" ".join(map(str, case[1])) for case in BAD])
def test_a_mistake_has_its_message(
    root: type[SupervisedConfig], changes: dict[str, Any], message: str, files: dict[str, Path]
) -> None:
    found = problems(root, changes, files)
    assert len(found) == 1, found
    assert message in found[0]


def test_all_mistakes_are_told_together(files: dict[str, Path]) -> None:
    found = problems(SFT, {"data.max_length": "x", "model.path": None, "trainer.test_freq": 3}, files)
    assert len(found) == 3


def test_an_override_of_a_section_names_one_of_its_own_keys() -> None:
    with pytest.raises(ConfigError, match=r"such as loss\.beta=\.\.\."):
        check_overrides(["~loss"], DPO)


def test_a_dataclass_is_taken_as_it_is() -> None:
    cfg = SFTConfig()
    assert read_config_of(SFTConfig, cfg).cfg is cfg
    assert read_config_of(SFTConfig, OmegaConf.create({})).cfg == cfg
