"""A user's module is imported once, a changed file again, and what fails is a mistake of the configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from paceline import external
from paceline.errors import ConfigError
from paceline.external import import_external, import_file, imported_modules


@pytest.fixture(autouse=True)
def _nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_imported", {})


def test_a_file_is_imported_once_and_again_after_a_change(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("held = object()\n")
    first = import_file(file, "a_test")
    assert import_file(file, "a_test") is first
    assert sys.modules["a_test_mine"] is first
    assert import_file(file, "another_test") is not first
    file.write_text("held = 2\n")
    os.utime(file, ns=(0, 1))
    assert import_file(file, "a_test").held == 2


def test_a_file_that_fails_leaves_no_half_module(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("before = 1\nraise ValueError('on purpose')\n")
    with pytest.raises(ValueError, match="on purpose"):
        import_file(file, "a_test")
    assert "a_test_broken" not in sys.modules


def test_what_was_imported_is_known_for_the_processes_that_are_started(tmp_path: Path):
    (file := tmp_path / "registers.py").write_text("")
    import_external(None)
    for _ in range(2):
        import_external(str(file))
        import_external("json")
    assert imported_modules() == (str(file), "json")


@pytest.mark.parametrize("library", ["no_such_module_anywhere", "{folder}/none.py", "{folder}/fails.py"])
def test_what_can_not_be_imported_names_the_key_and_is_not_counted(tmp_path: Path, library: str):
    (tmp_path / "fails.py").write_text("1 / 0\n")
    name = library.format(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.external_lib=.* can't be imported: "):
        import_external(name)
    assert imported_modules() == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.py can't be imported: FileNotFoundError"),
        (
            "import nothing_of_this_name",
            "can't be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("def", "can't be imported: SyntaxError"),
        ("x = 1", "algorithm.adv_estimator='nobodys_estimator' is not known"),
    ],
)
def test_a_module_that_fails_or_does_not_register_is_told_with_the_other_problems(
    train_command: Callable[..., CompletedProcess[str]], tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    named = ["actor_rollout_ref.model.external_lib=mine.py", "algorithm.adv_estimator=nobodys_estimator"]
    done = train_command(*named, "trainer.nnodes=0", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "trainer.nnodes=0 is out of range" in done.stderr
    assert "Traceback" not in done.stderr
