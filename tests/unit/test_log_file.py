from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.log_file import LOG_FOLDER_VARIABLE, log_to_file, terminal_lines, terminal_variables


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


def test_the_terminal_shows_bare_lines_and_files_have_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as a run's driver has one; this one is the terminal."""
    program = """if True:
        import logging, os, warnings
        from paceline.log_file import SAMPLES_LOGGER, log_process, output_to_log_file
        log_process("driver")
        logging.getLogger("paceline.part").info("step 1/2")
        logging.getLogger("paceline.part").warning("slow")
        logging.getLogger(SAMPLES_LOGGER).info("a response")
        logging.getLogger("vllm.part").warning("harmless")
        logging.getLogger("vllm.part").error("broken")
        warnings.warn("old call")
        with output_to_log_file():
            os.write(2, b"of compiled code\\n")
            print("of python", flush=True)
        print("of the user", flush=True)
    """
    variables = {LOG_FOLDER_VARIABLE: str(tmp_path / "logs"), **terminal_variables()}
    with terminal_lines(tmp_path / "logs"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
    assert capsys.readouterr().err == "step 1/2\nWARNING: slow\nERROR: broken\n"
    assert (done.stdout, done.stderr) == ("of the user\n", "")
    log = (tmp_path / "logs/driver.log").read_text()
    assert " INFO paceline.part: step 1/2\n" in log
    for text in ("a response", "harmless", "old call", "of compiled code", "of python"):
        assert text in log
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["driver.log"]


def test_a_worker_shows_only_warnings_and_where_no_terminal_is_reached_they_go_to_stderr(tmp_path: Path) -> None:
    program = """if True:
        import logging
        from paceline.log_file import log_process
        log_process("critic_0", process="critic[0]")
        logging.getLogger("paceline.part").info("loaded")
        logging.getLogger("paceline.part").warning("slow")
    """
    variables = {LOG_FOLDER_VARIABLE: str(tmp_path / "logs"), **terminal_variables()}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stderr == "WARNING of critic[0]: slow\n"
    assert "loaded" in (tmp_path / "logs/critic_0.log").read_text()
