"""A process that can't go on becomes the same command again, as often as restarts are left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading
from paceline.trainer.same_command import attempt, one_command, start_again_or_end

with one_command():
    left = attempt.restarts(int(sys.argv[1]))
    print(os.getpid(), os.getcwd(), os.environ["MINE"], left, attempt.goes_on, sorted(os.environ), flush=True)
    attempt.restarts_left, attempt.goes_on = left, left == 1
    os.chdir("/")
    os.environ.update(MINE="changed")
    threading.Thread(target=start_again_or_end, args=["It did not start."]).start()
    threading.Event().wait()
"""


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    package = str(Path(__file__).parents[3])
    environment = {**os.environ, "MINE": "as_given", "PYTHONPATH": package}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_it_has_the_process_the_folder_and_the_environment_and_one_restart_less(tmp_path: Path) -> None:
    done = run(PROGRAM, "2", folder=tmp_path)
    assert done.returncode == 1
    lines = [line.split(" ", 5) for line in done.stdout.splitlines()]
    assert [line[3:5] for line in lines] == [["2", "False"], ["1", "False"], ["0", "True"]]
    assert len({tuple(line[:3] + line[5:]) for line in lines}) == 1
    assert lines[0][1] == str(tmp_path)
    assert done.stderr.splitlines() == [
        "It did not start. Starting the same command again; 1 more restarts.",
        "It did not start. Starting the same command again; 0 more restarts.",
        "It did not start. The same command may be started again.",
    ]


@pytest.mark.parametrize("change", ["with one_command():", "attempt.restarts_left, "])
def test_a_program_of_the_users_and_a_command_without_restarts_just_end(tmp_path: Path, change: str) -> None:
    other = {"with one_command():": "if True:", "attempt.restarts_left, ": "attempt.given, "}
    done = run(PROGRAM.replace(change, other[change]), "2", folder=tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == "It did not start. The same command may be started again.\n"


def test_what_is_open_is_left_before_it_begins_again(tmp_path: Path) -> None:
    program = """
import sys
from contextlib import closing, suppress
from paceline.trainer.same_command import StartAgain, attempt, is_one_command, one_command

class Open:
    def close(self):
        print("closed", flush=True)

with one_command():
    left = attempt.restarts(1)
    print(left, attempt.goes_on, flush=True)
    attempt.restarts_left, attempt.goes_on = left, True
    with closing(Open()), suppress(Exception):
        if left:
            raise StartAgain
assert not is_one_command()
"""
    done = run(program, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1 False", "closed", "0 True", "closed"]
