"""Checkpoints are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.trainer.ppo.checkpoint import latest_checkpoint, new_checkpoint, read_state, rewind


def save(checkpoints: Path, step: int, content: str = "weights") -> None:
    with new_checkpoint(checkpoints, step, {"global_step": step}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model").write_text(content)


def test_the_latest_complete_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_10"
    assert read_state(tmp_path / "global_step_10") == {"global_step": 10}


def test_an_error_while_saving_leaves_the_checkpoint_before_it_in_force(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def fail() -> None:
        with new_checkpoint(tmp_path, 3, {}) as folder:
            (folder / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_2"
    assert not (tmp_path / "global_step_3").exists()
    save(tmp_path, 3)
    assert not (tmp_path / "global_step_3" / "half").exists()


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    save(tmp_path, 2, "old")
    save(tmp_path, 2, "new")
    assert (tmp_path / "global_step_2" / "actor" / "model").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest_checkpointed_iteration.txt"]


def test_a_pointer_to_an_incomplete_checkpoint_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "global_step_2" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"global_step_2.*trainer\.resume_mode=disable"):
        latest_checkpoint(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_state(tmp_path)


def test_rewinding_makes_an_older_checkpoint_the_latest_and_keeps_the_others(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, step)
    rewind(tmp_path, tmp_path / "global_step_2")
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_2"
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_1",
        "global_step_10.1",
        "global_step_2",
    ]


def test_a_kill_between_the_renames_of_a_step_saved_again_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2, "old")
    (tmp_path / "global_step_2").rename(tmp_path / ".global_step_2.old")
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_2"
    assert (tmp_path / "global_step_2" / "actor" / "model").read_text() == "old"


def test_what_an_interrupted_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".global_step_1.tmp" / "actor").mkdir(parents=True)
    save(tmp_path, 2)
    assert not (tmp_path / ".global_step_1.tmp").exists()
