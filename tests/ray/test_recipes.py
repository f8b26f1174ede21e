"""Each recipe from nothing to its end, in the short form that it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.recipe import recipe_names


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_runs_to_its_end(name: str, tmp_path: Path) -> None:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, "recipe", "run", name, "--short", "--output", str(tmp_path / name)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"recipe {name}: complete" in done.stdout
    assert list((tmp_path / name).glob("eval_*/metrics.jsonl")) or name == "agent"  # it validates in its run
