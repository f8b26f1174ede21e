"""Disks that are full or refuse, and data files that change: real runs in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.errors import CheckpointError, PacelineError, StorageError
from paceline.trainer.ppo.checkpoint import latest_checkpoint, verify_checkpoint
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.run_lock import run_lock
from tests.full_disk import largest_file
from tests.in_process import build_in_process, train_in_process
from tests.runs import base_config, read_metrics, results, write_sums


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    run_dir = tmp_path_factory.mktemp("whole")
    train_in_process(config(material, run_dir))
    return run_dir


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "trainer__total_training_steps": 3,
        "trainer__save_freq": 1,
        "trainer__val_before_train": False,
    }
    return base_config(material, run_dir, **(settings | changes))


def before(
    trainer: RayPPOTrainer, phase: str, step: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do something before a phase of a step."""
    original = getattr(trainer, phase)

    def acting(*args: Any, **kwargs: Any) -> Any:
        if trainer.global_step == step:
            act()
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer, phase, acting)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, 4 MiB large."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def fill(folder: Path) -> None:
    """Take all that is left, but for a page."""
    with (folder / "filler").open("wb") as file:
        file.write(bytes(max(0, shutil.disk_usage(folder).free - 4096)))


def assert_one_is_intact(run_dir: Path, step: int) -> None:
    checkpoints = run_dir / "checkpoints"
    newest = latest_checkpoint(checkpoints)
    assert newest is not None
    assert newest.name == f"global_step_{step}"
    assert verify_checkpoint(newest) == []
    assert not list(checkpoints.glob(".*.tmp"))  # what was begun takes no room


def test_files_that_cant_be_written_end_the_run_in_words_and_leave_the_checkpoint_before(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_in_process(config(material, tmp_path))
    limit = largest_file(60_000)  # less than the weights, more than everything else
    before(trainer, "update_actor", 2, limit.__enter__, monkeypatch)
    try:
        with pytest.raises(
            StorageError,
            match=r"the checkpoint of step 2 was not saved: .*can't be written: .*The last checkpoint is of step 1",
        ):
            trainer.fit()
    finally:
        limit.__exit__(None, None, None)
    assert_one_is_intact(tmp_path, 1)
    train_in_process(config(material, tmp_path))
    assert results(tmp_path) == results(whole)


def test_a_full_disk_ends_the_run_in_words_and_with_room_it_goes_on(
    material: Path, whole: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = small_disk / "run"
    trainer = build_in_process(config(material, run_dir))
    before(trainer, "update_actor", 2, lambda: fill(small_disk), monkeypatch)
    with pytest.raises(StorageError, match=r"disk is full, .* MiB are free: make room. Then start again"):
        trainer.fit()
    assert "Traceback" not in caplog.text
    for line in read_metrics(run_dir):  # whole lines only
        assert "training/global_step" in line
    assert latest_checkpoint(run_dir / "checkpoints") is not None
    (small_disk / "filler").unlink()
    remount(small_disk, "size=64m")
    train_in_process(config(material, run_dir))
    assert results(run_dir) == results(whole)


def test_a_disk_that_becomes_read_only_ends_the_run_in_words(
    material: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(small_disk)
    trainer = build_in_process(config(material, tmp_path / "run"))
    # After step 1 is saved and before step 2 is: no file of the disk is open then.
    before(trainer, "update_actor", 2, lambda: remount(small_disk, "ro"), monkeypatch)
    with pytest.raises(StorageError, match=r"read-only for this user.*The last checkpoint is of step 1"):
        trainer.fit()
    assert_one_is_intact(tmp_path / "run", 1)


def test_a_folder_that_is_removed_during_the_run_ends_it_in_words(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"

    def remove() -> None:
        while run_dir.exists():  # the checkpoint of step 2 is still being written, so once may not be enough
            shutil.rmtree(run_dir, ignore_errors=True)

    trainer = build_in_process(config(material, run_dir))
    before(trainer, "generate", 3, remove, monkeypatch)
    with pytest.raises(StorageError, match="The folder was removed while the run wrote to it"):
        trainer.fit()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"trainer: [1\n"])
def test_a_config_of_an_earlier_session_that_cant_be_read_is_kept_and_no_reason_to_stop(
    material: Path, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1))
    assert (tmp_path / "config.1.yaml").read_bytes() == content


def test_a_circle_of_links_in_the_place_of_the_checkpoints_is_named(material: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(PacelineError, match="checkpoints"):
        train_in_process(config(material, tmp_path))


def test_a_file_in_the_place_of_the_checkpoints_is_named(material: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(StorageError, match=rf"{tmp_path}/checkpoints.* can't be written"):
        train_in_process(config(material, tmp_path, trainer__resume_mode="auto", trainer__total_training_steps=1))


def test_a_look_is_allowed_while_the_run_goes_on_and_touches_nothing_of_it(material: Path, tmp_path: Path) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1))
    replaced = tmp_path / "checkpoints" / ".global_step_2.old"  # the run is about to save step 2 again
    shutil.copytree(tmp_path / "checkpoints" / "global_step_1", replaced)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with run_lock(tmp_path):
        train_in_process(config(material, tmp_path, trainer__val_only=True))
    for path, modified in times.items():
        assert path.stat().st_mtime_ns == modified
    assert [line["step"] for line in read_metrics(tmp_path / "validation")] == [1]


# ------------------------------------------------------------------------------------------------------ data files


def test_changed_training_files_are_refused_at_a_resume_unless_accepted(
    material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_sums(tmp_path / "train.parquet", 20)
    changes = {"data__train_files": str(data)}
    run_dir = tmp_path / "run"
    train_in_process(config(material, run_dir, trainer__total_training_steps=1, **changes))
    shutil.copy(data, tmp_path / "copy.parquet")  # another name and time, the same content
    moved = {"data__train_files": str(tmp_path / "copy.parquet")}
    train_in_process(config(material, run_dir, trainer__total_training_steps=2, **moved))
    write_sums(data, 24, seed=5)
    with pytest.raises(CheckpointError, match=rf"{data} had \d+ bytes and has \d+.*data.accept_changed_files=True"):
        train_in_process(config(material, run_dir, **changes))
    train_in_process(config(material, run_dir, data__accept_changed_files=True, **changes))
    assert "accepted; epoch 0 begins again" in caplog.text
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3]


def test_files_that_vanish_or_change_during_a_run_are_told_once_and_it_goes_on(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = {name: tmp_path / f"{name}.parquet" for name in ("train", "test")}
    for path in files.values():
        shutil.copy(material / path.name, path)
    changes = {"data__train_files": str(files["train"]), "data__val_files": str(files["test"])}
    trainer = build_in_process(config(material, tmp_path / "run", **changes))

    def meddle() -> None:
        files["train"].unlink()
        write_sums(files["test"], 9, seed=7)

    before(trainer, "generate", 1, meddle, monkeypatch)
    trainer.fit()
    assert results(tmp_path / "run") == results(whole)
    assert caplog.text.count("is no longer there. This run goes on with what it read") == 1
    assert caplog.text.count("a resumed one would refuse the file") == 2


# --------------------------------------------------------------------------------------------------------- secrets


def test_secrets_are_not_in_the_files_of_a_run(
    material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    secret = "s3cr3t-of-this-test"
    variables = {"WANDB_API_KEY": secret, "HF_TOKEN": secret, "PLAIN": "shown"}
    changes = {
        "ray_kwargs__ray_init": {"runtime_env": {"env_vars": variables}},
        "reward_model__sandbox__url": f"http://user:{secret}@sandbox:8080",
        "trainer__total_training_steps": 1,
    }
    train_in_process(config(material, tmp_path, **changes))
    saved = OmegaConf.load(tmp_path / "config.yaml")
    assert saved.ray_kwargs.ray_init.runtime_env.env_vars == {
        "WANDB_API_KEY": "***",
        "HF_TOKEN": "***",
        "PLAIN": "shown",
    }
    assert saved.reward_model.sandbox.url == "http://***@sandbox:8080"
    assert secret not in caplog.text
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holders == []
    assert os.environ.get("HF_TOKEN") != secret
