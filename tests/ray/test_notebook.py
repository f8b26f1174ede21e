"""The notebook of the examples, as a program: its cells one after the other, with fewer steps.

It has what docs/supervised.md shows of Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/notebook/first_steps.ipynb"
SHORTER = {"epochs=20,": "steps=2,", "steps=30,": "steps=1,", "=40,\n    mini_batch_size=20,": "=4,"}
"""What stands there, and what makes it quick."""


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells)
    for text, shorter in SHORTER.items():
        assert text in program
        program = program.replace(text, shorter)
    program += "\nassert len(rewarded.metrics) >= 1 and rewarded.model.is_dir() and taught.model.name == 'model'\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
