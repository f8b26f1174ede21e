from __future__ import annotations

import subprocess
import sys

import pytest

from paceline import __version__, cli
from paceline.cli.data import DATASETS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: paceline")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_unknown_command_fails_and_shows_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    text = capsys.readouterr().err
    assert "no command 'trian'. Did you mean train?" in text
    assert "quickstart" in text


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in cli.COMMANDS), *(["data", name, "--help"] for name in DATASETS)],
    ids=" ".join,
)
def test_help_imports_nothing_heavy_and_has_an_example(arguments: list[str]) -> None:
    code = f"""
import sys
from paceline.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(sorted({{"torch", "ray", "transformers", "hydra", "numpy"}} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    command = " ".join(["paceline", *arguments[:-1]])
    assert f"\n  {command} " in result.stdout.partition("examples:")[2]
    assert result.stderr == "[]\n"
