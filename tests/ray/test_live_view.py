"""A run in a terminal, as a user sees it: a pseudo terminal, and what was written to it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.report.status import read_status
from tests.runs import as_overrides, base_config, heed_ctrl_c, make_material, read_metrics


def in_terminal(arguments: list[str], on_text: Callable[[str, subprocess.Popen[bytes]], None]) -> tuple[int, str]:
    """Exit code and all that appeared; `on_text` sees it as it comes."""
    terminal, inside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        arguments, stdin=inside, stdout=inside, stderr=inside, env=environment, preexec_fn=heed_ctrl_c
    )
    os.close(inside)
    text = ""
    try:
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # Linux's way to say that nobody has the other end open
                break
            if not part:
                break
            text += part.decode(errors="replace")
            on_text(text, process)
        return process.wait(), text
    finally:
        os.close(terminal)
        if process.poll() is None:  # the test has failed, and the run would go on
            process.kill()


def command(config: dict[str, object]) -> list[str]:
    local = ["+ray_kwargs.ray_init.address=local", "+ray_kwargs.ray_init.num_cpus=2"]
    return [sys.executable, "-m", "paceline.trainer.main_ppo", *as_overrides(config), *local]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.slow
def test_the_view_stands_below_the_lines_and_every_process_has_a_log_file(tmp_path: Path) -> None:
    placement = {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 2}
    config = base_config(make_material(tmp_path), tmp_path / "run", trainer__total_training_steps=6, **placement)
    code, text = in_terminal(command(config), lambda *_: None)
    shown = plain(text)
    assert code == 0, shown
    assert "Update of the critic (over 1 device)" in shown
    assert re.search(r"\| actor_rollout_ref_pool +\| critic_pool +\|", shown)
    assert shown.index("Placement: split") < shown.index("starting")
    assert re.search(r"critic_pool\s+(idle|compute_values|update_critic)", shown)
    assert re.search(r"step\s+\d/6  [━╌]", shown)
    assert re.search(r"score\s+0\.\d+  [▁▂▃▄▅▆▇█]", shown)
    assert "tokens/s, " in shown
    assert "step 6/6 | " in shown, "the lines are there too"
    assert text.rstrip().rfind("\x1b[?25h") > text.rfind("\x1b[?25l"), "the cursor is visible again"

    assert read_status(tmp_path / "run")["state"] == "finished"
    logs = {path.name: path.read_text() for path in (tmp_path / "run/logs").iterdir()}
    assert {"driver.log", "actor_rollout+ref_0.log", "critic_0.log", "reward_0.log"} <= set(logs)
    assert "step 6/6 | " in logs["driver.log"]
    command_line = (tmp_path / "run/environment.json").read_text()
    assert "trainer.total_training_steps=6" in command_line, "that of the process in the terminal"


@pytest.mark.slow
def test_without_a_view_there_is_a_bare_line_for_each_step_and_wandb_ends_in_peace(tmp_path: Path) -> None:
    config = base_config(
        make_material(tmp_path),
        tmp_path / "run",
        trainer__test_freq="null",
        trainer__save_freq="null",
        trainer__log_val_generations=1,
        trainer__logger=["console", "wandb"],
    )
    done = subprocess.run(
        command(config), capture_output=True, text=True, check=True, env={**os.environ, "WANDB_MODE": "offline"}
    )
    shown = done.stdout + done.stderr
    assert "Traceback" not in shown
    assert "TaskRunner" not in shown
    steps = [line for line in done.stderr.splitlines() if re.match(r"step \d/4( |$)", line)]
    assert [int(line[5]) for line in steps] == [0, 1, 2, 3, 4]
    assert max(map(len, steps)) <= 80
    assert "[response]" not in shown
    assert "[response]" in (tmp_path / "run/logs/driver.log").read_text()
    assert "best validation: openai/gsm8k/reward/mean@1 " in done.stdout
    assert done.stdout.endswith(f"next: paceline report {tmp_path / 'run'}\n")
    assert (tmp_path / "run/checkpoints/global_step_4").is_dir()


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_gives_the_terminal_back(tmp_path: Path) -> None:
    config = base_config(
        make_material(tmp_path),
        tmp_path / "run",
        trainer__total_training_steps=100_000,
        trainer__save_on_interrupt=True,
    )
    pressed = []

    def press(text: str, process: subprocess.Popen[bytes]) -> None:
        if not pressed and "step 2/100000 | " in plain(text):
            pressed.append(True)
            process.send_signal(signal.SIGINT)

    code, text = in_terminal(command(config), press)
    assert pressed
    assert code == 130, plain(text)
    assert "ending after this step" in plain(text)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    last = read_metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/checkpoints/global_step_{last}").is_dir()
    assert read_status(tmp_path / "run")["state"] == "stopped"
