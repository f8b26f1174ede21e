"""Errors as messages and exit codes, for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException

from paceline.command_line import errors_as_exit_codes, hydra_errors_as_ours
from paceline.errors import ConfigError, DataError, Terminated


def test_a_script_with_a_bad_configuration_shows_its_own_lines_and_the_list_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from paceline.trainer.main_ppo import run_ppo\n"
        "run_ppo({'trainer': {'nnodes': 0}, 'algorithm': {'adv_estimator': 'gea'}})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    shown = done.stderr.splitlines()
    assert shown[:2] == ["Traceback (most recent call last):", f'  File "{script}", line 2, in <module>']
    assert shown[3] == "ConfigError: 4 problems in the configuration:"
    assert shown[5].startswith("  2. trainer.nnodes=0 is out of range"), done.stderr
    assert "main_ppo.py" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("trainer.x is not a key."), 2, "1 problem in the configuration:\n  1. trainer.x is not a key.\n"),
        (DataError("no rows"), 1, "no rows\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (Terminated(), 143, "stopped by SIGTERM\n"),
    ],
    ids=["configuration", "ours", "ctrl-c", "sigterm"],
)
def test_errors_of_ours_are_a_message_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop, errors_as_exit_codes():
        raise error
    assert stop.value.code == code
    assert capsys.readouterr().err == message


def test_other_errors_are_left_as_they_are():
    with pytest.raises(ZeroDivisionError), errors_as_exit_codes():
        raise ZeroDivisionError


def test_what_hydra_says_is_a_mistake_of_the_configuration_and_what_the_task_raises_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    def task() -> None:
        raise PermissionError("of the task")

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(ConfigError, match="no such group"), hydra_errors_as_ours(task):
        raise HydraException("no such group")
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir can't be made: .*read-only"), hydra_errors_as_ours(task):
        raise OSError("read-only")
    with pytest.raises(PermissionError, match="of the task"), hydra_errors_as_ours(task):
        task()
    assert "HYDRA_FULL_ERROR" not in os.environ
