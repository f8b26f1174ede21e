from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.log_file import LOG_FOLDER_VARIABLE, log_to_file


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)
    for handler in root.handlers:
        if handler not in before:
            root.removeHandler(handler)
            handler.close()


def test_lines_are_appended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FOLDER_VARIABLE, str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/critic_1.log").write_text("of an earlier attempt\n")
    log_to_file("critic_1")
    log_to_file("critic_1")
    logging.getLogger("some.part").info("a line")
    lines = (tmp_path / "logs/critic_1.log").read_text().splitlines()
    assert lines[0] == "of an earlier attempt"
    assert [line.split(" ", 2)[2] for line in lines[1:]] == ["INFO some.part: a line"]


def test_without_the_variable_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_FOLDER_VARIABLE, raising=False)
    before = list(logging.getLogger().handlers)
    log_to_file("critic_1")
    assert logging.getLogger().handlers == before


def test_a_folder_that_cant_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(LOG_FOLDER_VARIABLE, str(tmp_path / "file" / "logs"))
    log_to_file("critic_1")
    assert "can't be written, its lines are in the terminal only" in caplog.text
