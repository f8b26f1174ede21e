"""A secret that a real run is given is in no file of its folder, in no line of its output and in no report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import as_overrides, base_config, make_material

FIRST, SECOND = "qwertz-of-this-test", "second+secret/of=it"
REWARD = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, login=None):
    raise PermissionError(f"refused: {login['api_keys'][0]} {os.environ['MY_TOKEN']}")
"""


@pytest.mark.slow
def test_secrets_are_in_no_file_no_output_and_no_report(tmp_path: Path) -> None:
    material, run_dir = make_material(tmp_path / "material"), tmp_path / "run"
    (material / "reward.py").write_text(REWARD)
    overrides = [
        *as_overrides(base_config(material, run_dir, trainer__total_training_steps=1)),
        f"ray_kwargs.ray_init.runtime_env.env_vars={{MY_TOKEN: '{FIRST}'}}",
        f"custom_reward_function.reward_kwargs={{login: {{api_keys: ['{SECOND}'], user: me}}}}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "paceline.trainer.main_ppo", *overrides],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert "PermissionError('refused: *** ***')" in done.stderr, done.stderr
    assert done.returncode == 1
    assert "refused: *** ***" in "".join(file.read_text() for file in (run_dir / "logs").iterdir())
    report = [sys.executable, "-c", "import sys; from paceline.cli import main; sys.exit(main(sys.argv[1:]))", "report"]
    subprocess.run([*report, str(run_dir)], check=True, capture_output=True, cwd=tmp_path)
    shown = done.stdout + done.stderr
    for secret in (FIRST, SECOND):
        assert secret not in shown
        holders = [path for path in run_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert holders == []
