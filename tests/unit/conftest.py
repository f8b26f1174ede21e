from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small real run in split placement, with checkpoints of steps 2 and 4; its data beside it."""
    from tests.in_process import train_in_process
    from tests.runs import base_config, make_material

    folder = tmp_path_factory.mktemp("finished")
    changes = {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 2}
    config = base_config(make_material(folder), folder / "run", trainer__save_freq=2, trainer__test_freq=2, **changes)
    train_in_process(config)
    return folder / "run"


@pytest.fixture
def train_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CompletedProcess[str]]:
    """Runs `python -m paceline.trainer.main_ppo` here: in a process of its own it would load torch first."""
    from paceline.trainer import main_ppo

    def run(*arguments: str, cwd: Path) -> CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        code: str | int | None = 0
        try:
            main_ppo.cli()
        except SystemExit as stop:
            code = stop.code
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        printed = capsys.readouterr()
        return CompletedProcess(arguments, code if isinstance(code, int) else 1, printed.out, printed.err)

    return run
