from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run_folder import CHECKPOINT_FILE, STOP_FILE
from paceline.trainer.progress import RunProgress


def test_the_last_step_is_the_last_one_whatever_is_due() -> None:
    progress = RunProgress(Path("run"), last_step=3)
    due = []
    while not progress.is_last:
        progress.step += 1
        due.append([progress.is_due(every) for every in (2, None, -1)])
    assert due == [[False, False, False], [True, False, False], [True, True, False]]
    assert progress.end == "finished"


def test_a_file_that_asks_the_run_to_stop_is_taken_once(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, last_step=9)
    assert not progress.look_for_stop()
    (tmp_path / STOP_FILE).touch()
    assert progress.look_for_stop()
    assert progress.is_last
    assert progress.end == "stopped"
    assert not list(tmp_path.iterdir())


def test_a_file_that_asks_for_a_checkpoint_is_taken_once_and_ends_nothing(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, last_step=9)
    (tmp_path / CHECKPOINT_FILE).touch()
    assert [progress.is_asked_to_save(), progress.is_asked_to_save()] == [True, False]
    assert not progress.is_last


def test_a_resumed_run_that_is_complete_says_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    progress = RunProgress(Path("run"), last_step=4)
    progress.go_on_from(Path("checkpoints/global_step_4"), 4)
    assert progress.is_last
    assert "set trainer.total_training_steps higher" in caplog.text
