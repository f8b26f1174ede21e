"""Files that can't be read and folders that can't be written are found before a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.checks import validate
from paceline.config.path_checks import table_problems
from paceline.errors import ConfigError
from tests.runs import write_sums
from tests.stand_ins import with_changes


def test_an_unreadable_file_is_a_problem(good: dict[str, Any], files: dict[str, Path], monkeypatch):
    # Root may read everything, so the answer of the system is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="can't be read by this user"):
        validate(good)


def test_a_folder_that_cant_be_written_is_a_problem(good: dict[str, Any], files: dict[str, Path], monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir: .* can't be written by this user"):
        validate(with_changes(good, {"trainer.default_local_dir": "{missing}/run"}, files))


def as_nobody(act: Callable[[], str]) -> str:
    """What `act` gives in a process of another user; root may write anywhere."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            text = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_a_folder_that_another_user_owns_is_told_to_a_normal_user(good_folder: Path) -> None:
    def act() -> str:
        config = {"trainer": {"default_local_dir": str(good_folder / "run")}}
        try:
            validate(config)
        except ConfigError as error:
            return "\n".join(error.problems)
        return "nothing"

    read_only = f"trainer.default_local_dir: {good_folder} can't be written by this user."
    assert read_only in as_nobody(act)
    good_folder.chmod(0o777)
    assert "trainer.default_local_dir" not in as_nobody(act)
    assert list(good_folder.iterdir()) == []


def test_a_data_file_that_a_normal_user_may_not_read_is_told(good_folder: Path) -> None:
    file = write_sums(good_folder / "train.parquet", 2)
    file.chmod(0o600)
    text = as_nobody(lambda: "\n".join(table_problems("data.train_files", str(file))))
    assert text == f"data.train_files: {file} can't be read by this user. Change its permissions or set another file."


@pytest.fixture
def good_folder() -> Iterator[Path]:
    """A folder that others may look into, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
