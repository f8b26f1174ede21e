"""A folder has one run at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.trainer.ppo import run_lock as module
from paceline.trainer.ppo.run_lock import run_lock


def test_a_second_run_is_told_of_the_first_and_may_have_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    folder = tmp_path / "runs" / "new"
    with run_lock(folder), pytest.raises(ConfigError, match=f"in use by another run .process {os.getpid()} on "):
        run_lock(folder).__enter__()
    with run_lock(folder):
        pass


def test_an_error_of_the_run_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(KeyError), run_lock(tmp_path):
        raise KeyError
    with run_lock(tmp_path):
        pass
