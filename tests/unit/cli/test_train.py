"""`paceline train` is `python -m paceline.trainer.main_ppo` under a shorter name."""

from __future__ import annotations

import sys

import pytest

from paceline import cli
from paceline.trainer import main_ppo


def test_train_hands_its_arguments_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(main_ppo, "cli", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["paceline"])
    assert cli.main(["train", "trainer.nnodes=2", "--cfg", "job"]) == 0
    assert seen == [["trainer.nnodes=2", "--cfg", "job"]]


def test_train_with_a_bad_key_ends_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline"])
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "trainer.sead=2"])
    assert stop.value.code == 2
    assert "did you mean trainer.seed?" in capsys.readouterr().err
