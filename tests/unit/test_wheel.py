"""What a user installs is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_built_wheel_has_its_data_files_and_answers_help(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("paceline", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("paceline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "paceline/trainer/config/ppo_trainer.yaml" in archive.namelist()
        assert {f"paceline/report/page/page.{kind}" for kind in ("html", "css", "js")} <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    help_text = subprocess.run(
        [sys.executable, "-m", "paceline.trainer.main_ppo", "--help"],
        cwd=tmp_path / "site",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "trainer.n_gpus_per_node" in help_text
